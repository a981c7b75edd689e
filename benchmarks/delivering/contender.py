"""Interface of a contender in the delivery benchmark: it opens a corpus and yields rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOKENS_FILE, OFFSETS_FILE = "tokens.bin", "offsets.npy"


@dataclass(frozen=True)
class Tokens:
    """A corpus in the plainest form: all documents' ids end to end, and each document's start."""

    path: Path
    """File of ids, uint16."""
    offsets: np.ndarray
    """Document starts and the end, int64 [documents + 1]."""

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """Load a folder's tokens."""
        return cls(folder / TOKENS_FILE, np.load(folder / OFFSETS_FILE))

    def ids(self) -> np.ndarray:
        """Return all ids, uint16, as a memory map."""
        return np.memmap(self.path, np.uint16, "r")

    def documents(self) -> Iterator[np.ndarray]:
        """Yield each document's ids."""
        ids = self.ids()
        for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            yield ids[start:stop]

    def rows(self, seq_len: int) -> Iterator[np.ndarray]:
        """Yield the ids cut into rows of ``seq_len``, regardless of documents: the content of prepacked formats."""
        ids = self.ids()
        for start in range(0, len(ids) - seq_len + 1, seq_len):
            yield ids[start : start + seq_len]


@dataclass(frozen=True)
class Delivery:
    """An open corpus."""

    rows: Iterator[Any]
    """Endless rows; ``Contender.gives`` describes their content."""
    state: Callable[[], Any]
    """State that a checkpoint would keep to resume from here."""
    rows_at_once: int = 1
    """Corpus rows in each item of ``rows``: more than one for a micro-batch."""


Open = Callable[[Path, Path, int], Delivery]
"""Opens a corpus: its folder, the contender's own folder, tokens per row."""

Prepare = Callable[[Path, Path, int], None]
"""Writes a corpus in the contender's own format into its own existing folder, for rows of one length."""


def nothing_to_prepare(corpus: Path, own: Path, seq_len: int) -> None:
    """Do nothing, for contenders that read the corpus as it is."""


@dataclass(frozen=True)
class Contender:
    """One way to read rows from a corpus."""

    name: str
    open: Open
    gives: str
    """A row's content and integer type."""
    cuts: str = "–"
    """How documents become rows."""
    prepare: Prepare = nothing_to_prepare
    imports: Sequence[str] = ()
    """Packages it needs beyond this project, by import name."""
    burst: int = 1
    """Rows produced at once: only complete batches count."""


def endlessly(rows: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield the rows again and again."""
    while True:
        yield from rows()
