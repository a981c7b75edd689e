"""Packing: which pieces of which documents share a row, planned from lengths alone, before a token is read.

Documents longer than a row are cut into contiguous rows. Their remainders and short documents are packed by online
best fit. Nothing is dropped. The plan is a pure function of lengths, row length, seed and epoch.
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

# Salts that keep the two shuffles of an epoch apart. Part of the plan's version.
_DOCUMENTS, _ROWS = 1, 2


@dataclass(frozen=True)
class PackReport:
    """What a plan costs."""

    rows: int
    tokens: int
    padding_tokens: int
    padding_share: float
    """Padding tokens divided by all tokens of the rows."""
    documents_cut: int
    """Documents that do not stand in one row whole: exactly those longer than a row."""
    truncated_tokens: int
    """Tokens of documents that stand in no row: always 0, and counted rather than assumed."""


@dataclass(frozen=True)
class RowPlan:
    """Rows as runs of pieces: row ``r`` has pieces ``row_offsets[r]`` to ``row_offsets[r + 1]``. All arrays int64.

    Piece ``i`` is tokens ``starts[i]`` to ``stops[i]`` of document ``documents[i]``.
    """

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
        documents, starts, stops = self.documents[part], self.starts[part], self.stops[part]
        return list(zip(documents.tolist(), starts.tolist(), stops.tolist(), strict=True))

    def report(self, lengths: np.ndarray) -> PackReport:
        """Padding, cuts and truncation for the lengths the plan was made from."""
        packed = int((self.stops - self.starts).sum())
        capacity = self.num_rows * self.seq_len
        padding_share = 0.0
        if capacity:
            padding_share = (capacity - packed) / capacity
        pieces = np.bincount(self.documents, minlength=len(lengths))
        return PackReport(
            rows=self.num_rows,
            tokens=packed,
            padding_tokens=capacity - packed,
            padding_share=padding_share,
            documents_cut=int((pieces > 1).sum()),
            truncated_tokens=int(np.sum(lengths)) - packed,
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
    """Pack documents of ``lengths`` (all at least 1) into rows of at most ``seq_len`` tokens.

    With ``shuffle``, a hash of (seed, epoch) orders the documents before they are packed, and then the rows. Without
    it, both keep the order of the documents.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert min(seq_len, open_rows, int(lengths.min(initial=1))) >= 1, "lengths and sizes are at least 1"
    order = np.arange(len(lengths))
    if shuffle:
        order = shuffled(len(lengths), seed, epoch, _DOCUMENTS)
    # Documents are packed in shuffled order, so that the rows of an epoch mix other documents than those of the last.
    documents, starts, stops = _cut(order, lengths, seq_len)
    rows = _best_fit((stops - starts).tolist(), seq_len, open_rows)
    num_rows = int(rows.max(initial=-1)) + 1
    if shuffle:
        # Rows are numbered as they were opened, which says something of their pieces' lengths.
        rows = shuffled(num_rows, seed, epoch, _ROWS)[rows]
    # Stable: the pieces of a row stay in the order in which they were packed.
    by_row = np.argsort(rows, kind="stable")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows, minlength=num_rows))])
    return RowPlan(seq_len, documents[by_row], starts[by_row], stops[by_row], offsets)


def _cut(order: np.ndarray, lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents in ``order`` as pieces of at most ``seq_len``: number of the document, start, stop."""
    # Rounded up: the remainder of a document is a piece too.
    counts = -(-lengths[order] // seq_len)
    documents = np.repeat(order, counts)
    first_piece = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(documents)) - first_piece) * seq_len
    return documents, starts, np.minimum(starts + seq_len, lengths[documents])


def _best_fit(sizes: list[int], seq_len: int, open_rows: int) -> np.ndarray:
    """The row of each piece, rows numbered as they are opened.

    A piece goes to the open row with the fewest free tokens that still holds it. When too many rows are open, the
    fullest is closed: it is the least likely to find another piece.
    """
    rows = np.empty(len(sizes), dtype=np.int64)
    # Two lists side by side: free tokens of the open rows, ascending, and the row that has so many left.
    free: list[int] = []
    numbers: list[int] = []
    num_rows = 0
    for piece, size in enumerate(sizes):
        fit = bisect.bisect_left(free, size)
        if fit < len(free):
            left = free.pop(fit) - size
            row = numbers.pop(fit)
        else:
            left = seq_len - size
            row = num_rows
            num_rows += 1
        rows[piece] = row
        if left == 0:
            continue
        # The row goes back to where its free tokens keep the list ascending.
        again = bisect.bisect_left(free, left)
        free.insert(again, left)
        numbers.insert(again, row)
        # The fullest row stands first.
        if len(free) > open_rows:
            del free[0], numbers[0]
    return rows
