"""A stride's work between two ranks: rows sorted by class, then bands as between any other rows. Pure.

Tokens whose indices in their document are equal modulo the stride are a class
(``longctx/model/attention/strided.py``). Those of one class in one segment are equally far apart, so row indices tell
distances once a segment's rows are sorted by class.
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
    """One rank's rows, those of each segment sorted by class."""

    pieces: Segments
    """The classes of each segment, by class; their ``document`` is the class (its first token), and rows count in
    ``order``."""
    segment: ndarray
    """The segment of each piece."""
    order: ndarray
    """The local row of every sorted row."""


class StridedWork(NamedTuple):
    """Slices between rows that are gathered in another order first."""

    query_rows: ndarray
    """Each at most once, in the order in which the slices count them."""
    key_rows: ndarray
    """Likewise."""
    slices: ndarray

    def shifted(self, queries: int = 0, keys: ndarray | int = 0) -> StridedWork:
        """The same work with rows counted otherwise by the ranks that hold them."""
        return self._replace(query_rows=self.query_rows + queries, key_rows=self.key_rows + keys)

    def entry(self) -> Work:
        """The work as a kernel's caller takes it."""
        return Work(*map(torch.from_numpy, self))


def sort_by_class(segments: Segments, boundaries: ndarray, stride: int, reach: int, *, keys: bool) -> ClassSegments:
    """The rank's rows by class, without those that have no work.

    Rows have none that stand too early in their document to see tokens ``reach`` before them (``keys``: too late to be
    seen from there).
    """
    segments = _with_work(segments, boundaries, reach, keys=keys)
    step = lcm(stride, segments.step)  # between tokens of a class that are neighbours on the rank
    num_classes = step // segments.step
    segment, place = expand_ranges(np.zeros_like(segments.length), np.minimum(segments.length, num_classes))
    start = segments.start[segment] + place * segments.step
    length = -((place - segments.length[segment]) // num_classes)
    document = segments.document[segment]
    kind = boundaries[document] + (start - boundaries[document]) % stride
    row = np.cumsum(length) - length
    by_class = np.lexsort((start, kind))
    pieces = Segments(kind[by_class], start[by_class], length[by_class], row[by_class], step)
    return ClassSegments(pieces, segment[by_class], _class_order(segments, num_classes))


def _with_work(segments: Segments, boundaries: ndarray, reach: int, *, keys: bool) -> Segments:
    """The parts of the segments that see, or are seen by, tokens at least ``reach`` away."""
    least, most = boundaries[segments.document], boundaries[segments.document + 1]
    if keys:
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
    """The local rows of the segments, each segment's by class."""
    segment, place = expand_ranges(np.zeros_like(segments.length), segments.length)
    order = np.argsort(segment * num_classes + place % num_classes, kind="stable")
    return (segments.row[segment] + place)[order]


def strided_work(queries: ClassSegments, keys: ClassSegments, reach: int) -> StridedWork | None:
    """What the queries see of the keys outside of their windows, rows counted as the ranks hold them; None if nothing.

    Names the rows that have a part in it and no others.
    """
    bounds = Bounds(reach, None)
    q, k = meeting_segments(queries.pieces, keys.pieces, bounds)
    order = np.lexsort((queries.pieces.document[q], queries.segment[q], keys.segment[k]))
    no_sinks = np.empty(0, dtype=np.int64)
    table = slices_between(queries.pieces, q[order], keys.pieces, k[order], bounds, no_sinks)
    if not len(table):
        return None
    query_rows, queries_left_out = _rows_with_work(queries.order, table[:, Q_START], table[:, Q_STOP])
    key_rows, keys_left_out = _rows_with_work(keys.order, table[:, K_START], table[:, K_STOP])
    table = shift_slices(table, -queries_left_out[table[:, Q_START]], -keys_left_out[table[:, K_START]])
    return StridedWork(query_rows, key_rows, table)


def _rows_with_work(order: ndarray, starts: ndarray, stops: ndarray) -> tuple[ndarray, ndarray]:
    """The rows that some slice names, and for each place in the order how many before it no slice names."""
    edges = np.bincount(starts, minlength=len(order) + 1) - np.bincount(stops, minlength=len(order) + 1)
    named = edges.cumsum()[:-1] > 0
    return order[named], (~named).cumsum()
