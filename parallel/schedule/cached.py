"""Attention work between one rank's cached keys and a chunk's queries. Pure.

Here queries travel to the keys, while in training keys travel to the queries: a chunk has few tokens, its cache many.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy import ndarray

from longctx.kernels.attention.slices import OPEN
from longctx.model.attention.strided import reach
from longctx.model.attention.work import Work
from parallel.layout.cached import by_step, count_tokens
from parallel.layout.sequence import Runs
from parallel.schedule.bands import NO_SLICES, band_slices, mask_bounds
from parallel.schedule.segments import Segments, cut_segments
from parallel.schedule.strided import StridedWork, sort_by_class, strided_work
from parallel.schedule.work import Mask, entries, strided_bounds


def cached_work(queries: Runs, earlier: Runs, new: Runs, *, stop: int, mask: Mask, distances: bool) -> tuple[Work, ...]:
    """Return the work for chunk queries with one rank's keys; empty if no query sees a key.

    The chunk ends before token ``stop``. Key rows count through the runs in ``earlier``, which are all before the
    chunk, then through ``new``, within the chunk; query rows through ``queries``. With ``distances`` each slice stores
    its tokens' distance.
    """
    boundaries = np.array([0, stop])
    query_segments = cut_segments(queries, boundaries)
    keys, first_row = (*earlier, *new), 0
    slices, strided = [], []
    if mask.window is None and not distances:
        # Every query sees every key before the chunk, so one slice covers them all.
        keys, first_row = new, count_tokens(earlier)
        slices.append(_rectangle(count_tokens(queries), first_row))
    bounds = mask_bounds(causal=mask.causal, window=mask.window, sink_tokens=mask.sink_tokens)
    sink_ends = np.array([mask.sink_tokens])
    for row, runs in by_step(keys):
        segments = cut_segments(runs, boundaries)
        segments = replace(segments, row=segments.row + first_row + row)
        slices += [band_slices(query_segments, segments, b, sink_ends) for b in bounds]
        if mask.stride:
            strided += _strided(query_segments, segments, boundaries, mask)
    table = np.concatenate([NO_SLICES, *slices])
    if not len(table) and not strided:
        return ()
    return entries(table, strided)


def _rectangle(num_queries: int, num_keys: int) -> ndarray:
    if not num_keys:
        return NO_SLICES
    return np.array([[0, num_queries, 0, num_keys, OPEN, OPEN, 1, 0]], dtype=np.int64)


def _strided(queries: Segments, keys: Segments, boundaries: ndarray, mask: Mask) -> list[StridedWork]:
    assert mask.window is not None
    back = reach(mask.window, mask.stride)
    query_classes = sort_by_class(queries, boundaries, mask.stride, back, early=False)
    key_classes = sort_by_class(keys, boundaries, mask.stride, back, early=True)
    # Caches exist only for causal attention: no key follows its query.
    (bounds,) = strided_bounds(mask)
    found = strided_work(query_classes, key_classes, bounds)
    if found is None:
        return []
    return [found]
