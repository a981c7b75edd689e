"""Packing: which pieces of which documents share a row, planned from lengths alone, before a token is read.

Documents longer than a row are cut into contiguous rows. Their remainders and short documents are packed by online
best fit. Nothing is dropped. The plan is a pure function of lengths, row length, seed, epoch and block.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.shuffle import shuffled

OPEN_ROWS = 128
"""Rows kept open for best fit. 64 were as tight as sorting the whole corpus (padding at most 0.4 % at 1M tokens)."""

# Salts that keep the shuffles of an epoch apart: that of documents, and one for the rows of each block. Part of the
# plan's version, as the 0 of the permutation that deals documents out to blocks is.
_DOCUMENTS, _FIRST_ROWS = 1, 2


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
    num_documents: int
    """Documents that were planned."""
    document_tokens: int
    """Their tokens, all of which stand in rows."""

    @property
    def num_rows(self) -> int:
        """Rows of the plan."""
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


def plan_rows(
    lengths: np.ndarray,
    seq_len: int,
    *,
    documents: np.ndarray | None = None,
    seed: int = 0,
    epoch: int = 0,
    block: int = 0,
    shuffle: bool = True,
    open_rows: int = OPEN_ROWS,
) -> RowPlan:
    """Pack documents of ``lengths`` (all at least 1) into rows of at most ``seq_len`` tokens.

    ``documents`` are their numbers, ascending; 0, 1, 2 … unless given. With ``shuffle``, a hash of (seed, epoch) orders
    the documents before they are packed, and then the rows. Without it, both keep the order of the documents.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    assert min(seq_len, open_rows, int(lengths.min(initial=1))) >= 1, "lengths and sizes are at least 1"
    numbers = np.arange(len(lengths))
    if documents is not None:
        numbers = documents
    if shuffle:
        # Packed in shuffled order, so that the rows of an epoch mix other documents than those of the last.
        order = shuffled(numbers, seed, epoch, _DOCUMENTS)
        numbers, lengths = numbers[order], lengths[order]
    owners, starts, stops = _cut(lengths, seq_len)
    rows = _rows_of(stops - starts, seq_len, open_rows)
    num_rows = int(rows.max(initial=-1)) + 1
    if shuffle:
        # Rows are numbered as they were opened, which says something of their pieces' lengths.
        rows = shuffled(np.arange(num_rows), seed, epoch, _FIRST_ROWS + block)[rows]
    # Stable: the pieces of a row stay in the order in which they were packed.
    by_row = np.argsort(rows, kind="stable")
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows, minlength=num_rows))])
    return RowPlan(
        seq_len=seq_len,
        documents=numbers[owners[by_row]],
        starts=starts[by_row],
        stops=stops[by_row],
        row_offsets=offsets,
        num_documents=len(lengths),
        document_tokens=int(lengths.sum()),
    )


def _cut(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Documents in their order as pieces of at most ``seq_len``: index of the document, start, stop."""
    # Rounded up: the remainder of a document is a piece too.
    counts = -(-lengths // seq_len)
    owners = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(owners)) - first_piece) * seq_len
    return owners, starts, np.minimum(starts + seq_len, lengths[owners])


def _rows_of(sizes: np.ndarray, seq_len: int, open_rows: int) -> np.ndarray:
    """The row of each piece, rows numbered as they are opened."""
    # A piece that fills a row meets no other one: only the rest has to look for room.
    partial = np.flatnonzero(sizes < seq_len)
    openers = np.arange(len(sizes))
    openers[partial] = partial[_best_fit(sizes[partial].tolist(), seq_len, open_rows)]
    opens_row = openers == np.arange(len(sizes))
    return (np.cumsum(opens_row) - 1)[openers]


def _best_fit(sizes: Sequence[int], seq_len: int, open_rows: int) -> list[int]:
    """For each piece the number of the piece that opened its row.

    A piece goes to the open row with the fewest free tokens that still holds it. When too many rows are open, the
    fullest is closed: it is the least likely to find another piece.
    """
    openers: list[int] = []
    # Two lists side by side: free tokens of the open rows, ascending, and the piece that opened the row.
    free: list[int] = []
    rows: list[int] = []
    for piece, size in enumerate(sizes):
        fit = bisect.bisect_left(free, size)
        if fit < len(free):
            left = free.pop(fit) - size
            row = rows.pop(fit)
        else:
            left = seq_len - size
            row = piece
        openers.append(row)
        if left == 0:
            continue
        # The row goes back to where its free tokens keep the list ascending.
        again = bisect.bisect_left(free, left)
        free.insert(again, left)
        rows.insert(again, row)
        # The fullest row stands first.
        if len(free) > open_rows:
            del free[0], rows[0]
    return openers
