"""Slice table between two lists of segments: which query rows see which key rows. Pure.

A token's document and global index decide which keys it sees, while a kernel needs row indices. Between two segments in
the same document, query row i and key row j are ``step·(i − j) + offset`` tokens apart, so every bound on the distance
is a bound on i − j: a band.

Tables are int64 arrays [n, 8]; ``longctx/kernels/attention/slices.py`` describes the columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy import ndarray

from longctx.kernels.attention.slices import HI, K_START, LO, OFFSET, OPEN, STEP
from parallel.schedule.document_segments import MOST_TOKENS, DocumentSegments, expand_ranges, sort_key

NO_SLICES = np.empty((0, 8), dtype=np.int64)


class Bounds(NamedTuple):
    """Keys that a query sees: ``least`` to ``most`` tokens before it; ``sinks``: only a document's first tokens."""

    least: int | None
    most: int | None
    sinks: bool = False


def mask_bounds(*, causal: bool, window: int | None, sink_tokens: int) -> tuple[Bounds, ...]:
    """Express the mask as disjoint bounds on the query-key distance."""
    if window is None and causal:
        return (Bounds(0, None),)
    if window is None:
        return (Bounds(None, None),)
    nearest = 1 - window
    if causal:
        nearest = 0
    found = [Bounds(nearest, window - 1)]
    # Sinks count only beyond the window: bounds must be disjoint, or a pair would count twice.
    if sink_tokens:
        found.append(Bounds(window, None, sinks=True))
        if not causal:
            found.append(Bounds(None, -window, sinks=True))
    return tuple(found)


def own_slices(segments: DocumentSegments, causal: bool) -> ndarray:
    """Return the slices among a rank's own rows without a window: one per document.

    A document's rows on a rank are neighbours in ascending order, so causality between them is local.
    """
    lo = OPEN
    if causal:
        lo = 0
    changes = segments.document[1:] != segments.document[:-1]
    first = np.flatnonzero(np.append(True, changes))
    last = np.flatnonzero(np.append(changes, True))
    start, stop = segments.row[first], (segments.row + segments.length)[last]
    return _table(start, stop, start, stop, lo=lo)


def prefix_slices(queries: DocumentSegments, keys: DocumentSegments, causal: bool) -> ndarray:
    """Return the slices between two ranks' contiguous token spans without a window: full rectangles only.

    Two ranks' ranges never overlap. If causal, a query segment therefore sees the other rank's rows up to its start,
    which form a prefix of the document's rows there.
    """
    # First and last key segment in each query segment's document; if causal, only segments before it.
    first = np.searchsorted(keys.document, queries.document, side="left")
    stop = np.searchsorted(keys.document, queries.document, side="right")
    if causal:
        stop = np.minimum(stop, np.searchsorted(keys.start, queries.start))
    some = np.flatnonzero(first < stop)
    first, last = first[some], stop[some] - 1
    q_start = queries.row[some]
    q_stop = q_start + queries.length[some]
    k_start, k_stop = keys.row[first], keys.row[last] + keys.length[last]
    # Merge neighbouring query segments that see the same keys: fewer kernel calls.
    joined = (q_stop[:-1] == q_start[1:]) & (k_start[:-1] == k_start[1:]) & (k_stop[:-1] == k_stop[1:])
    begin, end = np.append(True, ~joined)[: len(some)], np.append(~joined, True)[: len(some)]
    return _table(q_start[begin], q_stop[end], k_start[begin], k_stop[begin])


def band_slices(queries: DocumentSegments, keys: DocumentSegments, bounds: Bounds, sink_ends: ndarray) -> ndarray:
    """Return the slices between two ranks' segments with exact distances, one per overlapping pair.

    A query segment's keys are ordered from the nearest segment back to the farthest. ``sink_ends`` holds the first
    token after each document's sinks. If the two steps differ (a separate key layout), i − j does not measure distance;
    then each query row becomes its own segment.
    """
    if queries.step != keys.step:
        queries = queries.single_rows()
    q, k = overlapping_segments(queries, keys, bounds)
    return slices_between(queries, q, keys, k, bounds, sink_ends)


def overlapping_segments(queries: DocumentSegments, keys: DocumentSegments, bounds: Bounds) -> tuple[ndarray, ndarray]:
    """Return (query segment, key segment) for every pair in one document that may satisfy the bounds."""
    nearest: ndarray | int = MOST_TOKENS
    if bounds.least is not None:
        nearest = queries.last - bounds.least
    farthest: ndarray | int = 0
    if bounds.most is not None:
        farthest = queries.start - bounds.most
    # Two binary searches by (document, token) find each query segment's range of key segments, for all segments at
    # once.
    stop = np.searchsorted(keys.start_keys, sort_key(queries.document, nearest), side="right")
    first = np.searchsorted(keys.last_keys, sort_key(queries.document, farthest), side="left")
    q, k = expand_ranges(first, stop)
    return q, (first + stop - 1)[q] - k  # from the nearest back


def slices_between(
    queries: DocumentSegments, q: ndarray, keys: DocumentSegments, k: ndarray, bounds: Bounds, sink_ends: ndarray
) -> ndarray:
    """Return trimmed slices between query segments ``q`` and key segments ``k``; drop pairs without work."""
    if not len(q):
        return NO_SLICES
    step = keys.step
    q_row, q_length, k_row, k_length = queries.row[q], queries.length[q], keys.row[k], keys.length[k]
    if bounds.sinks:
        # Sinks are the document's first keys, so keep only each key segment's head.
        num_sinks = -((keys.start[k] - sink_ends[keys.document[k]]) // step)
        k_length = np.clip(num_sinks, 0, k_length)
    # Distance in tokens = step · (i − j) + offset, so bounds on tokens become bounds lo ≤ i − j ≤ hi on rows.
    offset = (queries.start[q] - step * q_row) - (keys.start[k] - step * k_row)
    lo, hi = np.full_like(offset, -OPEN), np.full_like(offset, OPEN)
    if bounds.least is not None:
        lo = -((offset - bounds.least) // step)
    if bounds.most is not None:
        hi = (bounds.most - offset) // step
    # Trim query rows that see no key, and keys that no query sees.
    q_start, k_stop = np.maximum(q_row, k_row + lo), np.minimum(k_row + k_length, q_row + q_length - lo)
    q_stop, k_start = np.minimum(q_row + q_length, k_row + k_length + hi), np.maximum(k_row, q_row - hi)
    # Drop a bound that every pair in the trimmed slice satisfies: kernels skip masking for open bands.
    lo_is_slack, hi_is_slack = lo <= q_start - (k_stop - 1), hi >= (q_stop - 1) - k_start
    some = (q_start < q_stop) & (k_start < k_stop) & (lo <= hi) & (k_length > 0)
    lo, hi = np.where(lo_is_slack, OPEN, lo), np.where(hi_is_slack, OPEN, hi)
    return _table(q_start, q_stop, k_start, k_stop, lo, hi, step, offset)[some]


def shift_slices(table: ndarray, queries: ndarray | int = 0, keys: ndarray | int = 0) -> ndarray:
    """Return the table with query rows shifted by ``queries`` and key rows by ``keys``, for all slices or per slice."""
    # Bands bound i − j, so they move by the difference; an open bound stays open.
    by = np.asarray(queries) - np.asarray(keys)
    moved = table.copy()
    moved[:, :K_START] += np.reshape(queries, (-1, 1))
    moved[:, K_START:LO] += np.reshape(keys, (-1, 1))
    for bound in (LO, HI):
        moved[:, bound] = np.where(table[:, bound] == OPEN, OPEN, table[:, bound] + by)
    moved[:, OFFSET] -= table[:, STEP] * by
    return moved


def area(table: ndarray) -> int:
    """Count the row pairs inside all bands: a causal slice with n rows has n(n+1)/2."""
    return int(slice_areas(table).sum())


def slice_areas(table: ndarray) -> ndarray:
    """Count the row pairs per slice."""
    q_start, q_stop, k_start, k_stop, lo, hi = table.T[:STEP]
    # Pairs with i − j ≤ hi minus pairs with i − j < lo, both relative to the slice's first row and key.
    n, m, first = q_stop - q_start, k_stop - k_start, q_start - k_start
    below = np.where(lo == OPEN, -OPEN, lo) - 1
    return _num_at_most(n, m, hi - first) - _num_at_most(n, m, below - first)


def _num_at_most(n: ndarray, m: ndarray, bound: ndarray) -> ndarray:
    """Count pairs (i, j) in an n × m rectangle with i − j ≤ bound: row i has the keys from i − bound on."""
    bound = np.clip(bound, -m, n)

    def staircase(height: ndarray) -> ndarray:
        # Σ max(0, height − i) over the n rows, in closed form.
        rows = np.clip(height, 0, n)
        return rows * height - rows * (rows - 1) // 2

    return staircase(m + bound) - staircase(bound)


def _table(
    q_start: ndarray,
    q_stop: ndarray,
    k_start: ndarray,
    k_stop: ndarray,
    lo: ndarray | int = OPEN,
    hi: ndarray | int = OPEN,
    step: int = 1,
    offset: ndarray | int = 0,
) -> ndarray:
    table = np.empty((len(q_start), 8), dtype=np.int64)
    for number, column in enumerate((q_start, q_stop, k_start, k_stop, lo, hi, step, offset)):
        table[:, number] = column
    return table
