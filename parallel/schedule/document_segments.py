"""Segments: a ring rank's rows, cut at document boundaries. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy import ndarray

from parallel.layout.sequence import SequenceLayout, TokenRun


@dataclass(frozen=True)
class DocumentSegments:
    """Document segments in sequence order; each array has one entry per segment."""

    document: ndarray
    start: ndarray
    """First token, as a global index."""
    length: ndarray
    """Token count."""
    row: ndarray
    """Local row of the first token."""
    step: int
    """Distance in tokens between neighbouring rows: 1, except in striped layouts."""

    def __len__(self) -> int:
        return len(self.start)

    @cached_property
    def last(self) -> ndarray:
        """Last token per segment."""
        return self.start + (self.length - 1) * self.step

    @cached_property
    def start_keys(self) -> ndarray:
        """``sort_key`` for the first tokens."""
        return sort_key(self.document, self.start)

    @cached_property
    def last_keys(self) -> ndarray:
        """``sort_key`` for the last tokens."""
        return sort_key(self.document, self.last)

    def may_share_document(self, others: DocumentSegments) -> bool:
        """Return False if the two cannot share a document, usual for most rank pairs with many documents."""
        if not len(self) or not len(others):
            return False
        # Segments ascend by document, so first and last entry bound the documents on either side.
        return bool(self.document[0] <= others.document[-1] and others.document[0] <= self.document[-1])

    def single_rows(self) -> DocumentSegments:
        """Return the same rows, with one segment per row."""
        of, row = expand_ranges(np.zeros_like(self.length), self.length)
        start = self.start[of] + self.step * row
        return DocumentSegments(self.document[of], start, np.ones_like(start), self.row[of] + row, self.step)


MOST_TOKENS = 2**31
"""Upper bound on the sequence length, so that document and token fit into one int64."""


def sort_key(document: ndarray, token: ndarray | int) -> ndarray:
    """Return keys that ascend with the document and, within it, with the token."""
    return document * MOST_TOKENS + np.clip(token, 0, MOST_TOKENS - 1)


def cut_segments(runs: Sequence[TokenRun], boundaries: ndarray) -> DocumentSegments:
    """Cut a rank's token spans at document boundaries, in local (and global) order."""
    start, count, steps = np.array(runs, dtype=np.int64).reshape(-1, 3).T
    step = int(steps[0])
    # Find the documents that each span touches, then create one entry per (span, document).
    first = np.searchsorted(boundaries, start, side="right") - 1
    last = np.searchsorted(boundaries, start + (count - 1) * step, side="right") - 1
    run, document = expand_ranges(first, last + 1)
    start, count, first_row = start[run], count[run], (np.cumsum(count) - count)[run]
    # Rows in the span before the document's first token, and before the first token after the document.
    begin = np.clip(-((start - boundaries[document]) // step), 0, count)
    end = np.clip(-((start - boundaries[document + 1]) // step), 0, count)
    some = np.flatnonzero(end > begin)  # drop documents that are empty or fall between two rows
    begin, end = begin[some], end[some]
    return DocumentSegments(document[some], start[some] + step * begin, end - begin, first_row[some] + begin, step)


def segments_of_all(layout: SequenceLayout, boundaries: ndarray) -> tuple[DocumentSegments, ndarray]:
    """Return all ring ranks' segments in sequence order, and each segment's ring rank."""
    counts = [len(runs) for runs in layout.runs]
    runs = [run for runs in layout.runs for run in runs]
    starts = np.array([run.start for run in runs])
    order = np.argsort(starts)
    segments = cut_segments([runs[n] for n in order.tolist()], boundaries)
    owner = np.repeat(np.arange(len(counts)), counts)[order]
    # A segment belongs to the last span that starts before it: spans are disjoint.
    return segments, owner[np.searchsorted(starts[order], segments.start, side="right") - 1]


def shared_documents(layout: SequenceLayout, bounds: Sequence[int]) -> ndarray:
    """Return the indices (ascending) of documents with tokens on several ranks; every other document is on one rank."""
    # Concatenate spans by ring rank: row // num_local is then the rank that holds the row, Ulysses included.
    runs = [run for of_rank in layout.runs for run in of_rank]
    segments = cut_segments(runs, np.asarray(bounds, dtype=np.int64))
    num_local, num_documents = layout.num_local(0), len(bounds) - 1
    first = np.full(num_documents, layout.degree)
    np.minimum.at(first, segments.document, segments.row // num_local)
    last = np.full(num_documents, -1)
    np.maximum.at(last, segments.document, (segments.row + segments.length - 1) // num_local)
    return np.flatnonzero(first < last)


def expand_ranges(start: ndarray, stop: ndarray) -> tuple[ndarray, ndarray]:
    """Return (range index, value) for every value in the ranges [start, stop), concatenated."""
    # Value = its index in the concatenation − the index of its range's first value + the range's start.
    counts = np.maximum(stop - start, 0)
    of = np.repeat(np.arange(len(counts)), counts)
    before = np.cumsum(counts) - counts
    return of, np.arange(len(of)) + (start - before)[of]
