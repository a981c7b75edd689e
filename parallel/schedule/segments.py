"""Segments: the rows of a ring rank, cut into pieces of one document. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy import ndarray

from parallel.layout.sequence import Run, SequenceLayout


@dataclass(frozen=True)
class Segments:
    """Pieces of documents in the order of the sequence, with an entry of each array for each piece."""

    document: ndarray
    start: ndarray
    """First token, counted in the whole sequence."""
    length: ndarray
    """Tokens."""
    row: ndarray
    """Local row of the first token."""
    step: int
    """Distance in tokens between neighbouring rows: 1, except in striped layouts."""

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def last(self) -> ndarray:
        """Last token of each piece."""
        return self.start + (self.length - 1) * self.step

    @cached_property
    def start_keys(self) -> ndarray:
        """``sort_key`` of the first tokens."""
        return sort_key(self.document, self.start)

    @cached_property
    def last_keys(self) -> ndarray:
        """``sort_key`` of the last tokens."""
        return sort_key(self.document, self.last)

    def may_meet(self, others: Segments) -> bool:
        """Return whether the two may have a document in common: False for most ranks of many documents."""
        if not len(self) or not len(others):
            return False
        # Segments ascend by document, so the ends give the range of documents on either side.
        return bool(self.document[0] <= others.document[-1] and others.document[0] <= self.document[-1])

    def single_rows(self) -> Segments:
        """Return the same rows, each as a segment of its own."""
        of, row = expand_ranges(np.zeros_like(self.length), self.length)
        start = self.start[of] + self.step * row
        return Segments(self.document[of], start, np.ones_like(start), self.row[of] + row, self.step)


MOST_TOKENS = 2**31
"""No sequence is longer, so that a document and a token fit into one int64."""


def sort_key(document: ndarray, token: ndarray | int) -> ndarray:
    """Return keys that ascend with the document and, within one, with the token."""
    return document * MOST_TOKENS + np.clip(token, 0, MOST_TOKENS - 1)


def cut_segments(runs: Sequence[Run], boundaries: ndarray) -> Segments:
    """Cut a rank's runs at the document boundaries, in local (and global) order."""
    start, count, steps = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    step = int(steps[0])
    # The documents that each run touches, then one entry for each (run, document).
    first = np.searchsorted(boundaries, start, side="right") - 1
    last = np.searchsorted(boundaries, start + (count - 1) * step, side="right") - 1
    run, document = expand_ranges(first, last + 1)
    start, count, first_row = start[run], count[run], (np.cumsum(count) - count)[run]
    # Rows of the run before each document's first token, and before the token after its last.
    begin = np.clip(-((start - boundaries[document]) // step), 0, count)
    end = np.clip(-((start - boundaries[document + 1]) // step), 0, count)
    some = np.flatnonzero(end > begin)  # a document that is empty, or falls between two rows, leaves nothing
    begin, end = begin[some], end[some]
    return Segments(document[some], start[some] + step * begin, end - begin, first_row[some] + begin, step)


def segments_of_all(layout: SequenceLayout, boundaries: ndarray) -> tuple[Segments, ndarray]:
    """Return the segments of all ring ranks in the order of the sequence, and the ring rank of each."""
    counts = [len(runs) for runs in layout.runs]
    runs = [run for runs in layout.runs for run in runs]
    starts = np.array([run.start for run in runs])
    order = np.argsort(starts)
    segments = cut_segments([runs[n] for n in order.tolist()], boundaries)
    owner = np.repeat(np.arange(len(counts)), counts)[order]
    # A segment belongs to the last run that begins before it ends: runs are disjoint.
    return segments, owner[np.searchsorted(starts[order], segments.start, side="right") - 1]


def shared_documents(layout: SequenceLayout, bounds: Sequence[int]) -> ndarray:
    """Return the documents (numbers, ascending) with tokens on several ranks; the others are on one rank each."""
    # Ring rank after ring rank, so that a row counted over all of them gives the rank that holds it, Ulysses included.
    runs = [run for of_rank in layout.runs for run in of_rank]
    segments = cut_segments(runs, np.asarray(bounds, dtype=np.int64))
    num_local, num_documents = layout.num_local(0), len(bounds) - 1
    first = np.full(num_documents, layout.degree)
    np.minimum.at(first, segments.document, segments.row // num_local)
    last = np.full(num_documents, -1)
    np.maximum.at(last, segments.document, (segments.row + segments.length - 1) // num_local)
    return np.flatnonzero(first < last)


def expand_ranges(start: ndarray, stop: ndarray) -> tuple[ndarray, ndarray]:
    """Return (number of the range, value) for every value of the ranges [start, stop), one range after another."""
    # Each value is its index among all values, less the index of its range's first one, plus the range's start.
    counts = np.maximum(stop - start, 0)
    of = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return of, np.arange(len(of)) + (start - before)[of]
