"""Strided attention between two ranks: sort rows by class, then compute bands as for any other rows. Pure.

Tokens whose document indices are equal modulo the stride form a class (``longctx/model/attention/strided.py``). Within
a segment, tokens in one class are equally spaced, so after sorting by class a difference of row indices is a distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray

from longctx.kernels.attention.slices import K_START, K_STOP, Q_START, Q_STOP
from longctx.model.attention.attention_work import Work
from parallel.schedule.bands import Bounds, overlapping_segments, shift_slices, slices_between
from parallel.schedule.document_segments import DocumentSegments, expand_ranges


@dataclass(frozen=True)
class ClassSegments:
    """One rank's rows, sorted by class within each segment."""

    pieces: DocumentSegments
    """Each segment's classes, sorted by class; ``document`` is the class id (its first token), and rows index into
    ``order``."""
    segment: ndarray
    """Segment index per entry in ``pieces``."""
    order: ndarray
    """Local row for every sorted row."""

    def single_rows(self) -> ClassSegments:
        """Return the same rows, with one entry per row."""
        return ClassSegments(self.pieces.single_rows(), np.repeat(self.segment, self.pieces.length), self.order)


class StridedWork(NamedTuple):
    """Slices between rows that are first gathered in another order."""

    query_rows: ndarray
    """Each row at most once, in the order in which the slices count them."""
    key_rows: ndarray
    """As ``query_rows``, for keys."""
    slices: ndarray

    def shifted(self, queries: int = 0, keys: ndarray | int = 0) -> StridedWork:
        """Return the same work with query rows shifted by ``queries`` and key rows by ``keys``."""
        return self._replace(query_rows=self.query_rows + queries, key_rows=self.key_rows + keys)

    def entry(self) -> Work:
        """Convert to the form that kernel callers expect."""
        query_rows, key_rows, slices = (torch.from_numpy(array) for array in self)
        return Work(query_rows, key_rows, slices)


def sort_by_class(
    segments: DocumentSegments, boundaries: ndarray, stride: int, min_distance: int, *, early: bool
) -> ClassSegments:
    """Return the rank's rows by class, dropping rows too early in their document to have work.

    A row has work with tokens at least ``min_distance`` before it; with ``early``, with tokens at least
    ``min_distance`` after it.
    """
    segments = _with_work(segments, boundaries, min_distance, early=early)
    step = lcm(stride, segments.step)  # between neighbouring tokens in a class on this rank
    num_classes = step // segments.step
    # A segment's first num_classes rows are all in different classes, one per class: every later row joins one of
    # these.
    segment, row_in_segment = expand_ranges(np.zeros_like(segments.length), np.minimum(segments.length, num_classes))
    start = segments.start[segment] + row_in_segment * segments.step
    length = -((row_in_segment - segments.length[segment]) // num_classes)
    document = segments.document[segment]
    # Name a class by its first token in the document, which is unique over all documents.
    kind = boundaries[document] + (start - boundaries[document]) % stride
    row = np.cumsum(length) - length
    # Overlapping segments are found by binary search, which requires order by class, then token.
    by_class = np.lexsort((start, kind))
    pieces = DocumentSegments(kind[by_class], start[by_class], length[by_class], row[by_class], step)
    return ClassSegments(pieces, segment[by_class], _class_order(segments, num_classes))


def _with_work(segments: DocumentSegments, boundaries: ndarray, min_distance: int, *, early: bool) -> DocumentSegments:
    """Clip each segment to rows with document tokens at least ``min_distance`` before (``early``: after) them."""
    least, most = boundaries[segments.document], boundaries[segments.document + 1]
    if early:
        most = most - min_distance
    else:
        least = least + min_distance
    first = np.maximum(0, -((segments.start - least) // segments.step))
    stop = np.minimum(segments.length, -((segments.start - most) // segments.step))
    some = np.flatnonzero(first < stop)
    first, stop = first[some], stop[some]
    start, row = segments.start[some] + first * segments.step, segments.row[some] + first
    return DocumentSegments(segments.document[some], start, stop - first, row, segments.step)


def _class_order(segments: DocumentSegments, num_classes: int) -> ndarray:
    """Return the segments' local rows, each segment's sorted by class."""
    segment, row_in_segment = expand_ranges(np.zeros_like(segments.length), segments.length)
    # A stable sort keeps each class in sequence order.
    order = np.argsort(segment * num_classes + row_in_segment % num_classes, kind="stable")
    return (segments.row[segment] + row_in_segment)[order]


def build_strided_work(queries: ClassSegments, keys: ClassSegments, bounds: Bounds) -> StridedWork | None:
    """Return the queries' work with keys outside their windows, in local row indices; None if no pair has work.

    ``bounds`` describe the tokens beyond a window on one side. The result contains only rows with work.
    """
    # With different steps, a row difference measures distance only between single rows.
    if queries.pieces.step != keys.pieces.step:
        queries = queries.single_rows()
    q, k = overlapping_segments(queries.pieces, keys.pieces, bounds)
    order = np.lexsort((queries.pieces.document[q], queries.segment[q], keys.segment[k]))
    no_sinks = np.empty(0, dtype=np.int64)
    table = slices_between(queries.pieces, q[order], keys.pieces, k[order], bounds, no_sinks)
    if not len(table):
        return None
    # Only rows with work are gathered, so slice indices must skip the dropped rows.
    query_rows, queries_left_out = _rows_with_work(queries.order, table[:, Q_START], table[:, Q_STOP])
    key_rows, keys_left_out = _rows_with_work(keys.order, table[:, K_START], table[:, K_STOP])
    table = shift_slices(table, -queries_left_out[table[:, Q_START]], -keys_left_out[table[:, K_START]])
    return StridedWork(query_rows, key_rows, table)


def _rows_with_work(order: ndarray, starts: ndarray, ends: ndarray) -> tuple[ndarray, ndarray]:
    """Return the rows that some slice covers and, per index in the order, the number of uncovered rows before it."""
    # +1 at a slice's start and −1 at its end: the running sum counts the slices that cover a row.
    edges = np.bincount(starts, minlength=len(order) + 1) - np.bincount(ends, minlength=len(order) + 1)
    named = edges.cumsum()[:-1] > 0
    return order[named], (~named).cumsum()
