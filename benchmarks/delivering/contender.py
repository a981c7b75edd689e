"""What takes part in the contest of deliveries: who opens a corpus and gives row after row."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

TOKENS_FILE, OFFSETS_FILE = "tokens.bin", "offsets.npy"


@dataclass(frozen=True)
class Tokens:
    """A corpus in the plainest form: the ids of all documents end to end, and where each begins."""

    path: Path
    """The file of ids, uint16."""
    offsets: np.ndarray
    """Int64 [documents + 1]."""

    @classmethod
    def load(cls, folder: Path) -> Tokens:
        """That of a folder."""
        return cls(folder / TOKENS_FILE, np.load(folder / OFFSETS_FILE))

    def ids(self) -> np.ndarray:
        """All ids, uint16, as a memory map."""
        return np.memmap(self.path, np.uint16, "r")

    def documents(self) -> Iterator[np.ndarray]:
        """Yield the ids of each document."""
        ids = self.ids()
        for start, stop in zip(self.offsets[:-1], self.offsets[1:], strict=True):
            yield ids[start:stop]

    def rows(self, seq_len: int) -> Iterator[np.ndarray]:
        """Yield the ids cut into rows of ``seq_len``, documents or not: what prepacked formats hold."""
        ids = self.ids()
        for start in range(0, len(ids) - seq_len + 1, seq_len):
            yield ids[start : start + seq_len]


@dataclass(frozen=True)
class Delivery:
    """A corpus that is open."""

    rows: Iterator[Any]
    """Row after row, without end. What a row is, ``Contender.gives`` says."""
    state: Callable[[], Any]
    """What a checkpoint would keep to go on from here."""
    rows_at_once: int = 1
    """Rows of the corpus in each row of ``rows``: of a micro-batch more than one."""


Open = Callable[[Path, Path, int], Delivery]
"""Opens a corpus: its folder, the contender's own folder, tokens of a row."""

Prepare = Callable[[Path, Path, int], None]
"""Writes a corpus in the contender's own format into its own folder, which exists, for rows of one length."""


def nothing_to_prepare(corpus: Path, own: Path, seq_len: int) -> None:
    """For those who read the corpus as it is."""


@dataclass(frozen=True)
class Contender:
    """One way to get rows out of a corpus."""

    name: str
    open: Open
    gives: str
    """What stands in a row, and in which integers."""
    cuts: str = "–"
    """How documents become rows."""
    prepare: Prepare = nothing_to_prepare
    imports: Sequence[str] = ()
    """What it needs beyond this project, as it is imported."""
    burst: int = 1
    """Rows that are made at one time: only whole ones are counted."""


def endlessly(rows: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    """Yield what ``rows`` gives, again and again."""
    while True:
        yield from rows()
