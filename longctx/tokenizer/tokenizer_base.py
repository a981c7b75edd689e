"""``Tokenizer``: common interface and base class for both kinds of tokenizers."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Self

import numpy as np

from longctx.errors import DataError
from longctx.files import write_atomically
from longctx.tokenizer.byte_table import ByteTable
from longctx.tokenizer.control import Chunk, SpanSupport
from longctx.tokenizer.embedding_rows import check_rows
from longctx.tokenizer.special import SpecialIds
from longctx.untrusted.strict_json import printable

GROUP_CHARACTERS = 1 << 22
"""Text encoded at once on all cores; bounds memory in addition to a text and its ids."""


class Tokenizer(SpanSupport, ABC):
    """Vocabulary with the rule that cuts text into ids. Returned by ``load_tokenizer``.

    Text always stays text: no text becomes a control id, even if it spells one. A document is framed by
    ``document_begin`` and ``document_end``, if the model's own files name them.
    """

    kind: str
    """Encoding library and model type, for display."""
    threads = -1
    """SentencePiece threads for a group of text chunks; −1 is one per core. ``tokenizers`` obeys RAYON_NUM_THREADS."""
    continuation_prefix = ""
    """Prefix of vocabulary pieces that continue a word (WordPiece); empty if pieces contain spaces."""
    rows: int | None = None
    """Embedding rows in the model that reads the ids; None without a model."""

    def __init__(
        self,
        *,
        path: Path,
        vocab_size: int,
        special: SpecialIds,
        fingerprint: str,
        files: Mapping[str, bytes],
        is_control: np.ndarray,
    ) -> None:
        self.path = path
        """File or folder that was loaded."""
        self.vocab_size = vocab_size
        """Number of ids; every id is smaller."""
        self.special = special
        self.fingerprint = fingerprint
        """32 hex digits over everything that affects a document's ids, independent of file names and locations."""
        self.files = dict(files)
        """Files that recreate this tokenizer, by name; copied with shards and checkpoints."""
        self.is_control = is_control
        """True for each id that represents no text, bool [vocab_size]."""
        # Fail when loading, not at the first document.
        invalid_ids = [token for token in (special.begin, special.end) if token is not None and token >= vocab_size]
        if invalid_ids:
            raise DataError(
                f"tokenizer={path} has {vocab_size} ids, but the other tokenizer files set id {invalid_ids[0]} as "
                "begin or end. "
                "Take all tokenizer files from one model."
            )

    @property
    def document_begin(self) -> int | None:
        """Id before a document's first token; None if the tokenizer puts no id before a text."""
        return self.special.begin

    @property
    def document_end(self) -> int | None:
        """Id after a document's last token; None if the model's files name no end id."""
        return self.special.end

    @property
    def padding(self) -> int:
        """Id that fills a row; its target never counts, so any id is valid if the model lacks a padding id."""
        named = (self.special.padding, self.special.end, self.special.begin)
        return next((token for token in named if token is not None and token < self.vocab_size), 0)

    def for_model(self, vocab_size: int) -> Self:
        """Return this tokenizer for a model with ``vocab_size`` rows: text with an id outside them raises DataError."""
        # Shallow: both share the vocabulary and the library's objects.
        limited = copy.copy(self)
        limited.rows = vocab_size
        return limited

    def describe(self) -> str:
        """Return a one-line description: kind, size, begin and end, fingerprint."""
        named = {"begin": self.special.begin, "end": self.special.end}
        frame = [f"{role} {self.describe_token(token)}" for role, token in named.items()]
        return f"{self.kind}, {self.vocab_size:,} ids, {', '.join(frame)}, fingerprint {self.fingerprint}"

    def save(self, folder: Path) -> list[Path]:
        """Write ``files`` into a folder, byte for byte as they were read; return their paths."""
        paths = [folder / name for name in self.files]
        for path, content in zip(paths, self.files.values(), strict=True):
            write_atomically(path, content)
        return paths

    def encode(self, text: str, *, chunk_characters: int | None = None) -> np.ndarray:
        """Encode ``text`` to int32 ids, without begin and end, ``chunk_characters`` at a time.

        Memory in addition to text and ids is bounded.
        """
        # The empty array handles an empty text.
        parts = [np.empty(0, dtype=np.int32)]
        # Group by group: the libraries use several times a text's size while encoding.
        for group in groups(self.cut(text, chunk_characters), GROUP_CHARACTERS):
            parts += self.encode_chunks(group)
        return check_rows(self, np.concatenate(parts), "the text")

    def encode_document(self, text: str) -> np.ndarray:
        """Encode ``text`` between document begin and document end, int32."""
        ids = np.concatenate([self.prefix_ids, self.encode(text), self.suffix_ids])
        return check_rows(self, ids, "every document")

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a prompt as at the start of a document in training data."""
        if self.as_prompt is not None:
            return self.as_prompt(text)
        ids = np.concatenate([self.prefix_ids, self.encode(text)])
        return check_rows(self, ids, "the beginning of every document").tolist()

    @property
    def prefix_ids(self) -> np.ndarray:
        """Ids before every document: one or empty."""
        return _as_ids(self.special.begin)

    @property
    def suffix_ids(self) -> np.ndarray:
        """Ids after every document: one or empty."""
        return _as_ids(self.special.end)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Decode ``ids``; control ids give no text, bytes that are not UTF-8 give U+FFFD."""
        ids = np.asarray(ids, dtype=np.int64)
        _check_known(ids, self)
        return self._decode_text(ids[~self.is_control[ids]].tolist())

    @abstractmethod
    def cut(self, text: str, chunk_characters: int | None = None) -> Iterator[Chunk]:
        """Yield ``text`` in parts with ids that, concatenated, are those of the full text."""

    @abstractmethod
    def encode_chunks(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Encode each chunk to int32 ids, on ``threads`` cores."""

    @abstractmethod
    def decode_chunks(self, ids: Sequence[np.ndarray], chunks: Sequence[Chunk]) -> list[str]:
        """Decode each chunk's ids; a lossless tokenizer gives the chunk's own text."""

    @cached_property
    def byte_table(self) -> ByteTable | None:
        """Bytes per id if any text is the concatenation of its ids' bytes; otherwise None."""
        return None

    @abstractmethod
    def piece(self, token: int) -> str:
        """Return an id's spelling in the model's file, for display."""

    def describe_token(self, token: int | None, default: str = "none") -> str:
        """Format a token for a message: its spelling and id, or ``default`` for None."""
        if token is None:
            return default
        return f"{printable(self.piece(token))} ({token})"

    @abstractmethod
    def _decode_text(self, ids: list[int]) -> str:
        """Decode ids that are in the vocabulary and are not control ids."""


def _check_known(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    # The libraries' own errors name neither the id nor the file.
    invalid_ids = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(invalid_ids):
        last = tokenizer.vocab_size - 1
        raise DataError(f"id {invalid_ids[0]} is not in the vocabulary: {tokenizer.path} ends at id {last}.")


def groups(chunks: Iterable[Chunk], characters: int) -> Iterator[list[Chunk]]:
    """Yield chunks in lists with about ``characters`` characters in total, at least one chunk each."""
    group: list[Chunk] = []
    size = 0
    for chunk in chunks:
        group.append(chunk)
        size += len(chunk.text)
        if size >= characters:
            yield group
            group, size = [], 0
    if group:
        yield group


def encode_by_place(
    chunks: Sequence[Chunk], encode: Callable[[list[str], bool], Sequence[np.ndarray]]
) -> list[np.ndarray]:
    """Encode chunks by ``encode``, which takes texts and whether documents start with them."""
    ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * len(chunks)
    # Two calls instead of one per chunk: the libraries encode a batch on all cores.
    for is_first in (True, False):
        numbers = [number for number, chunk in enumerate(chunks) if chunk.is_first == is_first]
        if numbers:
            found = encode([chunks[number].text for number in numbers], is_first)
            for number, of_text in zip(numbers, found, strict=True):
                ids[number] = of_text
    return ids


def decode_by_place(
    ids: Sequence[np.ndarray],
    chunks: Sequence[Chunk],
    anchor: list[int],
    decode: Callable[[list[list[int]]], list[str]],
) -> list[str]:
    """Decode each chunk's ids by ``decode``; ``anchor`` holds a letter's ids.

    After a letter, a later chunk keeps its first space, which decoding may drop at the start of a text.
    """
    parts = [part.tolist() for part in ids]
    for part, chunk in zip(parts, chunks, strict=True):
        if not chunk.is_first:
            part[:0] = anchor
    # Decode the anchor alone too: its text is the prefix to remove.
    texts = decode([anchor, *parts])
    anchor_text = texts.pop(0)
    for number, chunk in enumerate(chunks):
        if not chunk.is_first:
            texts[number] = texts[number].removeprefix(anchor_text)
    return texts


def check_characters(text: str) -> None:
    """Raise DataError for half a surrogate pair, which UTF-8 cannot represent and no library encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"The text contains a lone surrogate ({error.reason}), which is not valid Unicode. Replace it."
        ) from error


def _as_ids(token: int | None) -> np.ndarray:
    """Return the id in a one-element array, or an empty array."""
    if token is None:
        return np.empty(0, dtype=np.int32)
    return np.array([token], dtype=np.int32)
