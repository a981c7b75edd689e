"""``Tokenizer``: the common interface, and base class of both kinds of tokenizers."""

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
from longctx.tokenizer.control import Chunk, Locating
from longctx.tokenizer.rows import check_rows
from longctx.tokenizer.special import SpecialIds
from longctx.tokenizer.spelling import Spelling
from longctx.untrusted.reading import printable

GROUP_CHARACTERS = 1 << 22
"""Text that is encoded at once on all cores: memory beyond a text and its ids is bounded by this."""


class Tokenizer(Locating, ABC):
    """Vocabulary and the rule that cuts text into its ids. Returned by ``load_tokenizer``.

    Text always stays text: no text becomes a control id, even if it spells one. A document is framed by
    ``document_begin`` and ``document_end``, if the model's own files name them.
    """

    kind: str
    """What encodes, for display: the library and the type of its model."""
    threads = -1
    """Threads that SentencePiece takes for a group of chunks; −1 is one for each core. ``tokenizers`` has
    RAYON_NUM_THREADS, which holds for a whole process."""
    goes_on = ""
    """What a piece begins with that goes on a word (WordPiece); empty where spaces are in the pieces."""
    rows: int | None = None
    """Embedding rows of the model that reads the ids; None if none does."""

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
        """The file or folder that was loaded."""
        self.vocab_size = vocab_size
        """Number of ids; every id is below it."""
        self.special = special
        self.fingerprint = fingerprint
        """32 hex digits of all that decides which ids a document gets; names and places of files are no part of it."""
        self.files = dict(files)
        """The files that make this tokenizer again, by name: they travel with shards and checkpoints."""
        self.is_control = is_control
        """For each id whether it stands for no text, bool [vocab_size]."""
        beyond = [token for token in (special.begin, special.end) if token is not None and token >= vocab_size]
        if beyond:
            raise DataError(
                f"tokenizer={path} has {vocab_size} ids, but the files beside it name id {beyond[0]} as begin or end. "
                "Take the tokenizer's files from one model."
            )

    @property
    def document_begin(self) -> int | None:
        """Id before a document's first token; None for a tokenizer that puts nothing before a text."""
        return self.special.begin

    @property
    def document_end(self) -> int | None:
        """Id after a document's last token; None if the model's files name no end id."""
        return self.special.end

    @property
    def padding(self) -> int:
        """Id that fills a row; its target never counts, so any id is valid if the model has none of its own."""
        named = (self.special.padding, self.special.end, self.special.begin)
        return next((token for token in named if token is not None and token < self.vocab_size), 0)

    def for_model(self, vocab_size: int) -> Self:
        """Return this tokenizer for a model of ``vocab_size`` rows: text with an id beyond them raises DataError."""
        limited = copy.copy(self)
        limited.rows = vocab_size
        return limited

    def describe(self) -> str:
        """Return a one-line description: kind, size, begin and end, fingerprint."""
        named = {"begin": self.special.begin, "end": self.special.end}
        frame = [f"{role} {self.spelt(token)}" for role, token in named.items()]
        return f"{self.kind}, {self.vocab_size:,} ids, {', '.join(frame)}, fingerprint {self.fingerprint}"

    def save(self, folder: Path) -> list[Path]:
        """Write ``files`` into a folder, byte for byte as they were read; return their paths."""
        paths = [folder / name for name in self.files]
        for path, content in zip(paths, self.files.values(), strict=True):
            write_atomically(path, content)
        return paths

    def encode(self, text: str, *, chunk_characters: int | None = None) -> np.ndarray:
        """Return the ids of ``text`` as int32, without begin and end.

        Memory beyond text and ids is bounded. ``chunk_characters`` is the number of characters encoded at a time.
        """
        # The empty part handles an empty text.
        parts = [np.empty(0, dtype=np.int32)]
        for group in groups(self.cut(text, chunk_characters), GROUP_CHARACTERS):
            parts += self.encode_chunks(group)
        return check_rows(self, np.concatenate(parts), "the text")

    def encode_document(self, text: str) -> np.ndarray:
        """Return the ids of ``text`` between document begin and document end, int32."""
        ids = np.concatenate([self.begins_with, self.encode(text), self.ends_with])
        return check_rows(self, ids, "every document")

    def encode_prompt(self, text: str) -> list[int]:
        """Return the ids of a prompt, as at the beginning of a document in training data."""
        if self.as_prompt is not None:
            return self.as_prompt(text)
        ids = np.concatenate([self.begins_with, self.encode(text)])
        return check_rows(self, ids, "the beginning of every document").tolist()

    @property
    def begins_with(self) -> np.ndarray:
        """Ids before every document: one or none."""
        return _as_ids(self.special.begin)

    @property
    def ends_with(self) -> np.ndarray:
        """Ids after every document: one or none."""
        return _as_ids(self.special.end)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """Return the text of ``ids``; control ids give no text, bytes that are not UTF-8 give U+FFFD."""
        ids = np.asarray(ids, dtype=np.int64)
        _check_known(ids, self)
        return self._decode_text(ids[~self.is_control[ids]].tolist())

    @abstractmethod
    def cut(self, text: str, chunk_characters: int | None = None) -> Iterator[Chunk]:
        """Yield ``text`` in parts with ids that, concatenated, are those of the full text."""

    @abstractmethod
    def encode_chunks(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """Return the ids of each chunk, int32, computed on ``threads`` cores."""

    @abstractmethod
    def decode_chunks(self, ids: Sequence[np.ndarray], chunks: Sequence[Chunk]) -> list[str]:
        """Return the text of each chunk's ids, which is the chunk's own text if the tokenizer is lossless."""

    @cached_property
    def spelling(self) -> Spelling | None:
        """Bytes of each id, if any text is the concatenation of its ids' bytes; otherwise None."""
        return None

    @abstractmethod
    def piece(self, token: int) -> str:
        """Return the spelling of one id in the model's file, for display."""

    def spelt(self, token: int | None, nothing: str = "none") -> str:
        """Return a token for a message: its spelling and its id, or ``nothing`` for no token."""
        if token is None:
            return nothing
        return f"{printable(self.piece(token))} ({token})"

    @abstractmethod
    def _decode_text(self, ids: list[int]) -> str:
        """Return the text of ids that are in the vocabulary and are not control ids."""


def _check_known(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    # The libraries' own errors name neither the id nor the file.
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(outside):
        last = tokenizer.vocab_size - 1
        raise DataError(f"id {outside[0]} is not in the vocabulary of {tokenizer.path}, which ends at {last}.")


def groups(chunks: Iterable[Chunk], characters: int) -> Iterator[list[Chunk]]:
    """Yield chunks in lists of about ``characters`` characters in total, at least one chunk each."""
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
    """Return the ids of each chunk by ``encode``, which takes texts and whether documents begin with them."""
    ids: list[np.ndarray] = [np.empty(0, dtype=np.int32)] * len(chunks)
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
    """Return the text of each chunk's ids by ``decode``; ``anchor`` are the ids of a letter.

    After a letter, a later chunk keeps its first space, which decoding may drop at the beginning of a text.
    """
    parts = [part.tolist() for part in ids]
    for part, chunk in zip(parts, chunks, strict=True):
        if not chunk.is_first:
            part[:0] = anchor
    texts = decode([anchor, *parts])
    anchor_text = texts.pop(0)
    for number, chunk in enumerate(chunks):
        if not chunk.is_first:
            texts[number] = texts[number].removeprefix(anchor_text)
    return texts


def check_characters(text: str) -> None:
    """Raise DataError for half of a surrogate pair, which UTF-8 cannot represent and no library encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"Text with a lone surrogate ({error.reason}) is not Unicode text. Replace it.") from error


def _as_ids(token: int | None) -> np.ndarray:
    """Return the id as an array of one, or an empty array."""
    if token is None:
        return np.empty(0, dtype=np.int32)
    return np.array([token], dtype=np.int32)
