"""Which pieces of which documents share a row: a plan made from lengths alone, before a token is read.

Documents longer than a row are cut into contiguous rows; what remains and short documents are placed by online best
fit. Nothing is dropped. The plan is a pure function of lengths, row length, seed and epoch.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

from data_pipeline.shuffle import shuffled

PLAN_VERSION = 1
"""Changes with the algorithm: a loader state refers to rows of one version."""

OPEN_ROWS = 128
"""Rows kept open for best fit. 64 were as tight as sorting the whole corpus (padding at most 0.4 % at 1M tokens)."""

_DOCUMENTS, _ROWS = 1, 2  # keeps the two shuffles of an epoch apart


@dataclass(frozen=True)
class PackReport:
    """What a plan costs."""

    rows: int
    tokens: int
    padding_tokens: int
    padding_share: float
    """Padding divided by all places."""
    documents_cut: int
    """Documents that do not stand in one row whole: exactly those longer than a row."""
    truncated_tokens: int
    """Tokens of documents that stand in no row: always 0, and counted rather than assumed."""


@dataclass(frozen=True)
class RowPlan:
    """Rows as runs of pieces: row ``r`` has pieces ``row_offsets[r]`` to ``row_offsets[r + 1]``. All arrays int64."""

    seq_len: int
    documents: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    row_offsets: np.ndarray

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self.row_offsets) - 1

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens of each row, without padding."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.stops - self.starts)])
        return np.diff(ends[self.row_offsets])

    def row(self, index: int) -> list[tuple[int, int, int]]:
        """Pieces of a row in order, each as document, start, stop."""
        part = slice(int(self.row_offsets[index]), int(self.row_offsets[index + 1]))
        columns = (self.documents[part].tolist(), self.starts[part].tolist(), self.stops[part].tolist())
        return list(zip(*columns, strict=True))

    def report(self, lengths: np.ndarray) -> PackReport:
        """Padding, cuts and truncation for the lengths the plan was made from."""
        placed, places = int((self.stops - self.starts).sum()), self.num_rows * self.seq_len
        pieces = np.bincount(self.documents, minlength=len(lengths))
        return PackReport(
            rows=self.num_rows,
            tokens=placed,
            padding_tokens=places - placed,
            padding_share=(places - placed) / places if places else 0.0,
            documents_cut=int((pieces > 1).sum()),
            truncated_tokens=int(np.sum(lengths)) - placed,
        )


def plan_rows(
    lengths: np.ndarray,
    seq_len: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    shuffle: bool = True,
    open_rows: int = OPEN_ROWS,
) -> RowPlan:
    """Packs documents of ``lengths`` (all at least 1) into rows of at most ``seq_len`` tokens.

    With ``shuffle`` documents are placed, and rows then ordered, by a hash of (seed, epoch); without, both keep the
    order of the documents.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert min(seq_len, open_rows, int(lengths.min(initial=1))) >= 1, "lengths and sizes are at least 1"
    order = shuffled(len(lengths), seed, epoch, _DOCUMENTS) if shuffle else np.arange(len(lengths))
    documents, starts, stops = _cut(order, lengths, seq_len)
    rows = _best_fit((stops - starts).tolist(), seq_len, open_rows)
    num_rows = int(rows.max()) + 1 if len(rows) else 0
    if shuffle:
        rows = shuffled(num_rows, seed, epoch, _ROWS)[rows]
    by_row = np.argsort(rows, kind="stable")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows, minlength=num_rows))])
    return RowPlan(seq_len, documents[by_row], starts[by_row], stops[by_row], offsets)


def _cut(order: np.ndarray, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents in ``order`` as pieces of at most ``seq_len``: number of the document, start, stop."""
    counts = -(-lengths[order] // seq_len)
    documents = np.repeat(order, counts)
    first_piece = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(documents)) - first_piece) * seq_len
    return documents, starts, np.minimum(starts + seq_len, lengths[documents])


def _best_fit(sizes: list[int], seq_len: int, open_rows: int) -> np.ndarray:
    """The row of each piece, rows numbered as they are opened.

    A piece goes to the open row with the least room that still holds it. When too many are open, the fullest is
    closed, as it is the least likely to find another piece.
    """
    rows = np.empty(len(sizes), dtype=np.int64)
    room: list[int] = []  # ascending; names[i] is the row that has room[i] places left
    names: list[int] = []
    opened = 0
    for piece, size in enumerate(sizes):
        place = bisect.bisect_left(room, size)
        if place < len(room):
            left, row = room.pop(place) - size, names.pop(place)
        else:
            left, row, opened = seq_len - size, opened, opened + 1
        rows[piece] = row
        if left:
            place = bisect.bisect_left(room, left)
            room.insert(place, left)
            names.insert(place, row)
            if len(room) > open_rows:
                del room[0], names[0]
    return rows
