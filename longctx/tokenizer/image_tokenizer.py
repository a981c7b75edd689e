"""``ImageTokenizer``: an image data set's format in a tokenizer's place.

Shards, checkpoints and conversions carry a tokenizer's files and compare its fingerprint. With ``image.json`` as such a
file, they carry shape, classes and palette in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np
import xxhash

from longctx.errors import DataError
from longctx.images.image_format import FORMAT, ImageFormat
from longctx.tokenizer.control import Chunk
from longctx.tokenizer.special import SpecialIds
from longctx.tokenizer.tokenizer_base import Tokenizer

IMAGE_FILE = "image.json"
_BEGIN = re.compile(rb'\s*\{\s*"format"\s*:\s*"' + FORMAT.encode() + rb'"')


class ImageTokenizer(Tokenizer):
    """Ids of pixels: the 256 values of a byte, or palette colors and one id for begin and mask.

    Stored images contain pixels only: no id begins or ends them.
    """

    kind = "images"

    def __init__(self, content: bytes, *, path: Path) -> None:
        """Parse the content of ``image.json``; ``path`` is the file or folder for messages."""
        self.format = ImageFormat.from_json(content, path)
        colors = self.format.num_colors
        # Image GPT puts this id before the first pixel, or in place of a masked one.
        extra_id, vocab_size = None, 256
        if colors:
            extra_id, vocab_size = colors, colors + 1
        is_control = np.zeros(vocab_size, dtype=bool)
        if extra_id is not None:
            is_control[extra_id] = True
        super().__init__(
            path=path,
            vocab_size=vocab_size,
            special=SpecialIds(bos=extra_id, begin=None, end=None, padding=None, stop_ids=(), mask=extra_id),
            fingerprint=_fingerprint(self.format),
            files={IMAGE_FILE: content},
            is_control=is_control,
        )

    @classmethod
    def of(cls, image_format: ImageFormat, path: Path) -> ImageTokenizer:
        """Build the tokenizer for a format that is not in a file yet."""
        return cls(image_format.content(), path=path)

    def describe(self) -> str:
        """Return a one-line description: size, channels, palette, classes, fingerprint."""
        return f"{self.kind}, {self.format.describe()}, fingerprint {self.fingerprint}"

    def cut(self, text: str, chunk_characters: int | None = None) -> Iterator[Chunk]:
        """Raise DataError: images have no text."""
        self._refuse_text()

    def encode_chunks(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Raise DataError: images have no text."""
        self._refuse_text()

    def decode_chunks(self, ids: Sequence[np.ndarray], chunks: Sequence[Chunk]) -> list[str]:
        """Return an empty text per chunk."""
        return [""] * len(ids)

    def piece(self, token: int) -> str:
        """Return a description of an id: its value, its color, or ``begin``."""
        if not self.format.num_colors:
            return f"value {token}"
        if self.is_control[token]:
            return "begin"
        values = ", ".join(map(str, self.format.colors_of(np.array(token)).tolist()))
        return f"color {token} ({values})"

    def _decode_text(self, ids: list[int]) -> str:
        return ""

    def _refuse_text(self) -> NoReturn:
        raise DataError(
            f"tokenizer={self.path} is an image format, which encodes no text. Use a text tokenizer, or build images "
            "with `longctx data build --kind images`."
        )


def is_image_format(content: bytes) -> bool:
    """Return True if a file starts like ``image.json``."""
    return _BEGIN.match(content) is not None


def _fingerprint(image_format: ImageFormat) -> str:
    """Return the xxh3_128 over the canonical JSON, independent of the file's spacing."""
    canonical = json.dumps(image_format.to_json(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(canonical.encode())
