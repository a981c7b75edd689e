"""A stride's work between two ranks: rows sorted by class, then bands as between any other rows. Pure.

Tokens whose indices in their document are equal modulo the stride are a class
(``longctx/model/attention/strided.py``). Those of one class in one segment are equally far apart, so a difference
of row indices is a distance once a segment's rows are sorted by class.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray

from longctx.kernels.attention.slices import K_START, K_STOP, Q_START, Q_STOP
from longctx.model.attention.work import Work
from parallel.schedule.bands import Bounds, meeting_segments, shift_slices, slices_between
from parallel.schedule.segments import Segments, expand_ranges


@dataclass(frozen=True)
class ClassSegments:
    """Rows of one rank, those of each segment sorted by class."""

    pieces: Segments
    """The classes of each segment, by class; their ``document`` is the class (its first token), and rows count in
    ``order``."""
    segment: ndarray
    """The segment of each piece."""
    order: ndarray
    """The local row of every sorted row."""

    def single_rows(self) -> ClassSegments:
        """Return the same rows, each as a piece of its own."""
        return ClassSegments(self.pieces.single_rows(), np.repeat(self.segment, self.pieces.length), self.order)


class StridedWork(NamedTuple):
    """Slices between rows that are first gathered in another order."""

    query_rows: ndarray
    """Each at most once, in the order in which the slices count them."""
    key_rows: ndarray
    """Likewise."""
    slices: ndarray

    def shifted(self, queries: int = 0, keys: ndarray | int = 0) -> StridedWork:
        """Return the same work with query rows shifted by ``queries`` and key rows by ``keys``."""
        return self._replace(query_rows=self.query_rows + queries, key_rows=self.key_rows + keys)

    def entry(self) -> Work:
        """Return the work in the form that a kernel's caller takes."""
        query_rows, key_rows, slices = (torch.from_numpy(array) for array in self)
        return Work(query_rows, key_rows, slices)


def sort_by_class(segments: Segments, boundaries: ndarray, stride: int, reach: int, *, early: bool) -> ClassSegments:
    """Return the rank's rows by class, without those that are too early in their document to have work.

    A row has work with tokens at least ``reach`` before it; ``early`` rows have it with tokens at least so far after.
    """
    segments = _with_work(segments, boundaries, reach, early=early)
    step = lcm(stride, segments.step)  # between tokens of a class that are neighbours on the rank
    num_classes = step // segments.step
    # The first num_classes rows of a segment are of different classes; each of the others belongs to one of them.
    segment, row_in_segment = expand_ranges(np.zeros_like(segments.length), np.minimum(segments.length, num_classes))
    start = segments.start[segment] + row_in_segment * segments.step
    length = -((row_in_segment - segments.length[segment]) // num_classes)
    document = segments.document[segment]
    # A class is named by its first token in the document, a number that no other document has.
    kind = boundaries[document] + (start - boundaries[document]) % stride
    row = np.cumsum(length) - length
    # Meeting segments are found by binary search, which needs them by class and then by token.
    by_class = np.lexsort((start, kind))
    pieces = Segments(kind[by_class], start[by_class], length[by_class], row[by_class], step)
    return ClassSegments(pieces, segment[by_class], _class_order(segments, num_classes))


def _with_work(segments: Segments, boundaries: ndarray, reach: int, *, early: bool) -> Segments:
    """Return the segments' parts with tokens of their document at least ``reach`` before (``early``: after) them."""
    least, most = boundaries[segments.document], boundaries[segments.document + 1]
    if early:
        most = most - reach
    else:
        least = least + reach
    first = np.maximum(0, -((segments.start - least) // segments.step))
    stop = np.minimum(segments.length, -((segments.start - most) // segments.step))
    some = np.flatnonzero(first < stop)
    first, stop = first[some], stop[some]
    start, row = segments.start[some] + first * segments.step, segments.row[some] + first
    return Segments(segments.document[some], start, stop - first, row, segments.step)


def _class_order(segments: Segments, num_classes: int) -> ndarray:
    """Return the local rows of the segments, each segment's by class."""
    segment, row_in_segment = expand_ranges(np.zeros_like(segments.length), segments.length)
    # Stable: rows of a class stay in the order of the sequence.
    order = np.argsort(segment * num_classes + row_in_segment % num_classes, kind="stable")
    return (segments.row[segment] + row_in_segment)[order]


def strided_work(queries: ClassSegments, keys: ClassSegments, bounds: Bounds) -> StridedWork | None:
    """Return the queries' work with keys outside of their windows, rows counted as the ranks hold them; None if none.

    ``bounds`` are the tokens beyond a window on one side. The result names only the rows that have work.
    """
    # If the two step differently, a difference of rows measures distance only between single rows.
    if queries.pieces.step != keys.pieces.step:
        queries = queries.single_rows()
    q, k = meeting_segments(queries.pieces, keys.pieces, bounds)
    order = np.lexsort((queries.pieces.document[q], queries.segment[q], keys.segment[k]))
    no_sinks = np.empty(0, dtype=np.int64)
    table = slices_between(queries.pieces, q[order], keys.pieces, k[order], bounds, no_sinks)
    if not len(table):
        return None
    # Only rows with work are gathered, so slices count them without those that are left out.
    query_rows, queries_left_out = _rows_with_work(queries.order, table[:, Q_START], table[:, Q_STOP])
    key_rows, keys_left_out = _rows_with_work(keys.order, table[:, K_START], table[:, K_STOP])
    table = shift_slices(table, -queries_left_out[table[:, Q_START]], -keys_left_out[table[:, K_START]])
    return StridedWork(query_rows, key_rows, table)


def _rows_with_work(order: ndarray, starts: ndarray, stops: ndarray) -> tuple[ndarray, ndarray]:
    """Return the rows that some slice names, and for each index of the order the number of unnamed rows before it."""
    # +1 where a slice begins, −1 where it ends: the running sum counts the slices that cover a row.
    edges = np.bincount(starts, minlength=len(order) + 1) - np.bincount(stops, minlength=len(order) + 1)
    named = edges.cumsum()[:-1] > 0
    return order[named], (~named).cumsum()
