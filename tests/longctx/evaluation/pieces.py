"""A tokenizer without a model: it cuts a text by one regular expression, so that lengths are easy to know."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from longctx.tokenizer import Chunk, Tokenizer
from longctx.tokenizer.special import SpecialIds

PATTERN = r" ?[A-Za-z]{1,5}|\d{1,3}|\s|[^A-Za-z\d\s]"
VOCABULARY = 1002


class PieceTokenizer(Tokenizer):
    """Up to five letters, up to three digits, or any other character are a token each."""

    kind = "pieces"

    def __init__(self, *, begin: int | None = None, pattern: str = PATTERN) -> None:
        self._pattern = pattern
        special = SpecialIds(bos=begin, begin=begin, end=None, padding=None, stop_ids=())
        super().__init__(
            path=Path("pieces"),
            vocab_size=VOCABULARY,
            special=special,
            fingerprint="pieces",
            files={},
            is_control=np.arange(VOCABULARY) == begin,
        )

    def cut(self, text: str, chunk_characters: int | None = None) -> Iterator[Chunk]:
        yield Chunk(text, True)

    def encode_chunks(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        return [np.fromiter(map(_id, re.findall(self._pattern, chunk.text)), np.int32) for chunk in chunks]

    def decode_chunks(self, ids: Sequence[np.ndarray], chunks: Sequence[Chunk]) -> list[str]:
        raise NotImplementedError("only lengths are asked for")

    def piece(self, token: int) -> str:
        return str(token)

    def _decode_text(self, ids: list[int]) -> str:
        raise NotImplementedError("only lengths are asked for")


def _id(piece: str) -> int:
    """The first character, above the id that may begin a document: no two lengths depend on it."""
    return ord(piece[0]) % 1000 + 2
