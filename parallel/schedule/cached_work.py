"""Attention work between one rank's cached keys and a chunk's queries. Pure.

Here queries travel to the keys, while in training keys travel to the queries: a chunk has few tokens, its cache many.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy import ndarray

from longctx.kernels.attention.slices import OPEN
from longctx.model.attention.attention_work import Work
from longctx.model.attention.strided import class_lookback
from parallel.layout.cached_layout import by_step, count_tokens
from parallel.layout.sequence import TokenRuns
from parallel.schedule.bands import NO_SLICES, band_slices, mask_bounds
from parallel.schedule.document_segments import DocumentSegments, cut_segments
from parallel.schedule.ring_work import Mask, entries, strided_bounds
from parallel.schedule.strided_pairs import StridedWork, build_strided_work, sort_by_class


def cached_work(
    queries: TokenRuns, prefix: TokenRuns, new: TokenRuns, *, stop: int, mask: Mask, relative_positions: bool
) -> tuple[Work, ...]:
    """Return the work for chunk queries with one rank's keys; empty if no query sees a key.

    The chunk ends before token ``stop``. Key rows count through the token spans in ``prefix``, which are all before the
    chunk, then through ``new``, within the chunk; query rows through ``queries``. With ``relative_positions`` each
    slice stores its tokens' distance.
    """
    boundaries = np.array([0, stop])
    query_segments = cut_segments(queries, boundaries)
    keys, first_row = (*prefix, *new), 0
    slices, strided = [], []
    if mask.window is None and not relative_positions:
        # Every query sees every key before the chunk, so one slice covers them all.
        keys, first_row = new, count_tokens(prefix)
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


def _strided(queries: DocumentSegments, keys: DocumentSegments, boundaries: ndarray, mask: Mask) -> list[StridedWork]:
    assert mask.window is not None
    back = class_lookback(mask.window, mask.stride)
    query_classes = sort_by_class(queries, boundaries, mask.stride, back, early=False)
    key_classes = sort_by_class(keys, boundaries, mask.stride, back, early=True)
    # Caches exist only for causal attention: no key follows its query.
    (bounds,) = strided_bounds(mask)
    found = build_strided_work(query_classes, key_classes, bounds)
    if found is None:
        return []
    return [found]
