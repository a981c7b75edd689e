"""A stride's work between two ranks: rows sorted by class, then bands as between any other rows. Pure.

Tokens whose places in their document are equal modulo the stride are a class
(``longctx/model/attention/strided.py``). Those of one class in one segment are equally far apart, so row indices tell
distances once a segment's rows are sorted by class.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import lcm
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from longctx.kernels.attention.slices import slice_table
from longctx.model.attention.strided import Strided
from parallel.layout.sequence import Run
from parallel.schedule.pairs import Bounds, Segment, column_pairs, cut_segments, meet


class ClassSegment(NamedTuple):
    """The classes of one segment, each a column: class, first token, tokens, first sorted row."""

    start: int
    """First token."""
    stop: int
    """One past the last one."""
    columns: ndarray


class ClassRows:
    """One rank's rows, each segment's sorted by class.

    Rows are left out where they stand too early in their document to see anything outside of a window (``keys``: too
    late to be seen). Tokens of a class are ``step`` apart.
    """

    def __init__(self, runs: Sequence[Run], cu_seqlens: Sequence[int], stride: int, back: int, *, keys: bool) -> None:
        """``back`` is the mask's ``reach``."""
        self.stride, self.back, self._keys = stride, back, keys
        self._runs, self._cu_seqlens, self._row_step = runs, cu_seqlens, runs[0].step
        self.step = lcm(stride, self._row_step)

    @property
    def of_document(self) -> dict[int, list[ClassSegment]]:
        """Each document's segments, in the order of the sequence."""
        return self._sorted[0]

    @property
    def order(self) -> ndarray:
        """The local row of every sorted row."""
        return self._sorted[1]

    @cached_property
    def _sorted(self) -> tuple[dict[int, list[ClassSegment]], ndarray]:
        found: dict[int, list[ClassSegment]] = {}
        order, done = [np.empty(0, dtype=np.int64)], 0
        for segment in cut_segments(self._runs, self._cu_seqlens):
            cut = self._with_work(segment)
            if cut.count > 0:
                columns, rows = self._classes(cut, done)
                last = cut.start + (cut.count - 1) * self._row_step
                found.setdefault(cut.document, []).append(ClassSegment(cut.start, last + 1, columns))
                order.append(rows)
                done += cut.count
        return found, np.concatenate(order)

    def _with_work(self, segment: Segment) -> Segment:
        """The part of a segment that sees, or is seen by, tokens at least ``back`` away."""
        document, token, count, local = segment
        least, most = self._cu_seqlens[document], self._cu_seqlens[document + 1]
        least, most = (least, most - self.back) if self._keys else (least + self.back, most)
        first = max(0, -((token - least) // self._row_step))
        last = min(count, -((token - most) // self._row_step))
        return Segment(document, token + first * self._row_step, last - first, local + first)

    def _classes(self, segment: Segment, done: int) -> tuple[ndarray, ndarray]:
        """The columns of a segment's classes, and its local rows in their order."""
        every = self.step // self._row_step
        rows = np.arange(segment.count)
        places = rows[:every]
        tokens = segment.start + places * self._row_step
        counts = -((places - segment.count) // every)
        of = segment.document * self.stride + (tokens - self._cu_seqlens[segment.document]) % self.stride
        columns = np.stack((of, tokens, counts, done + np.cumsum(counts) - counts))
        return columns, segment.local + np.argsort(rows % every, kind="stable")


def strided_work(queries: ClassRows, keys: ClassRows) -> Strided | None:
    """What the queries see of the keys outside of their windows, rows counted as the ranks hold them; None if nothing.

    Names the rows that have a part in it and no others.
    """
    bounds, nothing = Bounds(keys.back, None), np.empty(0, dtype=np.int64)
    parts = [
        meet(q.columns, k.columns, keys.step, bounds, nothing, 0)
        for document, segments in queries.of_document.items()
        for k in keys.of_document.get(document, ())
        for q in segments
        if k.start + keys.back < q.stop
    ]
    found = np.concatenate(parts, axis=1) if parts else np.empty((7, 0), dtype=np.int64)
    if not found.size:
        return None
    q0, q1, k0, k1 = found[:4]
    query_rows, no_query = _kept(queries.order, q0, q1)
    key_rows, no_key = _kept(keys.order, k0, k1)
    pairs = column_pairs(found, -no_query[q0], -no_key[k0], keys.step)
    return Strided(torch.from_numpy(query_rows), torch.from_numpy(key_rows), slice_table(pairs))


def neighbours(rows: Tensor) -> list[tuple[int, int]]:
    """Half-open ranges that hold these rows and no others."""
    ascending = rows.sort().values
    first = torch.cat((torch.tensor([True]), ascending.diff() > 1))
    last = torch.cat((first[1:], torch.tensor([True])))
    return list(zip(ascending[first].tolist(), (ascending[last] + 1).tolist(), strict=True))


def _kept(order: ndarray, starts: ndarray, stops: ndarray) -> tuple[ndarray, ndarray]:
    """The rows at these places of the order, and for each place how many before it are left out."""
    edges = np.bincount(starts, minlength=len(order) + 1) - np.bincount(stops, minlength=len(order) + 1)
    kept = edges.cumsum()[:-1] > 0
    return order[kept], (~kept).cumsum()
