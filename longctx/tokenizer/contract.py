"""What the rest of the code knows of a tokenizer: ``Tokenizer``, the base of both kinds."""

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
    """A vocabulary and the rule that cuts text into its ids. ``load_tokenizer`` makes one.

    What stands in a text is text: no text becomes a control id, whatever it spells. A document is framed by
    ``document_begin`` and ``document_end``, each where the model's own files name one.
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
        """Id after a document's last token; None where the model's files name no end id."""
        return self.special.end

    @property
    def padding(self) -> int:
        """Id that fills a row; its target never counts, so any id serves where the model has none of its own."""
        named = (self.special.padding, self.special.end, self.special.begin)
        return next((token for token in named if token is not None and token < self.vocab_size), 0)

    def for_model(self, vocab_size: int) -> Self:
        """Return this tokenizer for a model of so many rows: DataError for a text that has an id beyond them."""
        limited = copy.copy(self)
        limited.rows = vocab_size
        return limited

    def describe(self) -> str:
        """The tokenizer in a line: kind, size, begin and end, fingerprint."""
        named = {"begin": self.special.begin, "end": self.special.end}
        frame = [f"{role} {self.spelt(token)}" for role, token in named.items()]
        return f"{self.kind}, {self.vocab_size:,} ids, {', '.join(frame)}, fingerprint {self.fingerprint}"

    def save(self, folder: Path) -> list[Path]:
        """Write ``files`` into a folder, byte for byte as they were read; returns their paths."""
        paths = [folder / name for name in self.files]
        for path, content in zip(paths, self.files.values(), strict=True):
            write_atomically(path, content)
        return paths

    def encode(self, text: str, *, chunk_characters: int | None = None) -> np.ndarray:
        """The ids of ``text`` as int32, without begin and end.

        Memory beyond text and ids is bounded. ``chunk_characters`` is how much is encoded at a time.
        """
        # The empty part stands for a text without any.
        parts = [np.empty(0, dtype=np.int32)]
        for group in groups(self.cut(text, chunk_characters), GROUP_CHARACTERS):
            parts += self.encode_chunks(group)
        return check_rows(self, np.concatenate(parts), "the text")

    def encode_document(self, text: str) -> np.ndarray:
        """The ids of ``text`` between document begin and document end, int32."""
        ids = np.concatenate([self.begins_with, self.encode(text), self.ends_with])
        return check_rows(self, ids, "every document")

    def encode_prompt(self, text: str) -> list[int]:
        """The ids of a document's beginning, as training data has them: what a model continues."""
        if self.as_prompt is not None:
            return self.as_prompt(text)
        ids = np.concatenate([self.begins_with, self.encode(text)])
        return check_rows(self, ids, "the beginning of every document").tolist()

    @property
    def begins_with(self) -> np.ndarray:
        """The ids before every document: one or none."""
        return _as_ids(self.special.begin)

    @property
    def ends_with(self) -> np.ndarray:
        """The ids after every document: one or none."""
        return _as_ids(self.special.end)

    def decode(self, ids: Sequence[int] | np.ndarray) -> str:
        """The text of ``ids``; control ids give nothing, bytes that are no UTF-8 give U+FFFD."""
        ids = np.asarray(ids, dtype=np.int64)
        _check_known(ids, self)
        return self._decode_text(ids[~self.is_control[ids]].tolist())

    @abstractmethod
    def cut(self, text: str, chunk_characters: int | None = None) -> Iterator[Chunk]:
        """Yield ``text`` in parts whose ids, one after the other, are those of the whole."""

    @abstractmethod
    def encode_chunks(self, chunks: Sequence[Chunk]) -> list[np.ndarray]:
        """The ids of each chunk, int32, on ``threads`` cores."""

    @abstractmethod
    def decode_chunks(self, ids: Sequence[np.ndarray], chunks: Sequence[Chunk]) -> list[str]:
        """What the ids of each chunk say: its text, where the tokenizer gives text back exactly."""

    @cached_property
    def spelling(self) -> Spelling | None:
        """The bytes of each id, where a text is these one after the other and nothing else; None elsewhere."""
        return None

    @abstractmethod
    def piece(self, token: int) -> str:
        """How the model's file spells one id, for display."""

    def spelt(self, token: int | None, nothing: str = "none") -> str:
        """Return a token for a message: its spelling and its id, or the word for no token."""
        if token is None:
            return nothing
        return f"{printable(self.piece(token))} ({token})"

    @abstractmethod
    def _decode_text(self, ids: list[int]) -> str:
        """The text of ids that are in the vocabulary and no control ids."""


def _check_known(ids: np.ndarray, tokenizer: Tokenizer) -> None:
    # The libraries' own errors name neither the id nor the file.
    outside = ids[(ids < 0) | (ids >= tokenizer.vocab_size)]
    if len(outside):
        last = tokenizer.vocab_size - 1
        raise DataError(f"id {outside[0]} is not in the vocabulary of {tokenizer.path}, which ends at {last}.")


def groups(chunks: Iterable[Chunk], characters: int) -> Iterator[list[Chunk]]:
    """Yield chunks in lists of about so many characters together, at least one chunk each."""
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

    After some letter a later chunk keeps its first space, which decoding may take from a text's beginning.
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
    """DataError for half of a surrogate pair, which no UTF-8 holds and no library encodes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"Text with a lone surrogate ({error.reason}) is not Unicode text. Replace it.") from error


def _as_ids(token: int | None) -> np.ndarray:
    """The id as an array of one, or an empty array."""
    if token is None:
        return np.empty(0, dtype=np.int32)
    return np.array([token], dtype=np.int32)
