"""Which rows of one rank meet which rows of another: bands of row indices between two lists of segments. Pure.

A token's document and its place in the sequence decide what it sees; a kernel wants row indices. Between two pieces of
the same document the one follows from the other: query row i and key row j stand ``step·(i − j) + offset`` tokens
apart, so every bound on the distance is a bound on i − j.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cached_property
from itertools import repeat
from typing import NamedTuple

import numpy as np

from longctx.kernels.attention.slices import AttentionSlice
from parallel.layout.sequence import Run


class Segment(NamedTuple):
    """A piece of one document on one rank: ``count`` tokens from global token ``start``, from local row ``local``."""

    document: int
    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    local: int


class Bounds(NamedTuple):
    """Tokens that a query sees lie ``least`` to ``most`` before it; ``sinks`` restricts them to a document's first."""

    least: int | None
    most: int | None
    sinks: bool = False


def mask_bounds(*, causal: bool, window: int | None, sink_tokens: int) -> tuple[Bounds, ...]:
    """The mask as disjoint bounds on the distance of query to key."""
    if window is None:
        return (Bounds(0 if causal else None, None),)
    found = [Bounds(0 if causal else 1 - window, window - 1)]
    if sink_tokens:
        found.append(Bounds(window, None, sinks=True))
        if not causal:
            found.append(Bounds(None, -window, sinks=True))
    return tuple(found)


def cut_segments(runs: Sequence[Run], cu_seqlens: Sequence[int] | np.ndarray) -> list[Segment]:
    """A rank's runs cut at document boundaries, in local (and global) order."""
    segments, local = [], 0
    for start, count, step in runs:
        done = 0
        while done < count:
            token = start + step * done
            document = bisect_right(cu_seqlens, token) - 1
            stop = min(count, -((start - cu_seqlens[document + 1]) // step))
            segments.append(Segment(document, token, stop - done, local + done))
            done = stop
        local += count
    return segments


class Rows:
    """One rank's segments, and those of each document."""

    def __init__(self, runs: Sequence[Run], cu_seqlens: Sequence[int] | np.ndarray) -> None:
        self.step = runs[0].step
        self._runs, self._cu_seqlens = runs, cu_seqlens

    @property
    def has_one_run(self) -> bool:
        """Whether ``columns`` can be had."""
        return len(self._runs) == 1

    @cached_property
    def segments(self) -> list[Segment]:
        """In local (and global) order."""
        return cut_segments(self._runs, self._cu_seqlens)

    @cached_property
    def of_document(self) -> dict[int, list[Segment]]:
        """The segments of each document."""
        found: dict[int, list[Segment]] = {}
        for segment in self.segments:
            found.setdefault(segment.document, []).append(segment)
        return found

    @cached_property
    def starts(self) -> dict[int, list[int]]:
        """First tokens of each document's segments."""
        return {document: [s.start for s in found] for document, found in self.of_document.items()}

    @cached_property
    def columns(self) -> np.ndarray:
        """Document, start, count and local row of every segment of a rank that has one run, a row of the array each."""
        ((start, count, step),) = self._runs
        edges = np.clip(-((start - np.asarray(self._cu_seqlens)) // step), 0, count)  # rows before each boundary
        document = np.flatnonzero(edges[1:] > edges[:-1])
        local = edges[document]
        return np.stack((document, start + step * local, edges[document + 1] - local, local))


def own_pairs(rows: Rows, causal: bool) -> list[AttentionSlice]:
    """A rank's rows among themselves without a window: one pair a document.

    A document's rows on a rank are neighbours in ascending order, so causality between them is local.
    """
    lo = 0 if causal else None
    if rows.has_one_run:
        _, _, count, local = rows.columns
        first, last = local.tolist(), (local + count).tolist()
        return [AttentionSlice(a, b, a, b, lo) for a, b in zip(first, last, strict=True)]
    found = []
    for segments in rows.of_document.values():
        first, last = segments[0].local, segments[-1].local + segments[-1].count
        found.append(AttentionSlice(first, last, first, last, lo))
    return found


def whole_pairs(queries: Rows, keys: Rows, causal: bool) -> list[AttentionSlice]:
    """Pairs between two ranks' runs of neighbouring tokens, without a window: full rectangles only.

    Ranges of two ranks never overlap, so what a query segment sees of a document on the other rank is the rows before
    it: a prefix of that document's rows there, which are neighbours.
    """
    found: list[AttentionSlice] = []
    for q in queries.segments:
        theirs = keys.of_document.get(q.document)
        if theirs is None:
            continue
        num_seen = bisect_left(keys.starts[q.document], q.start) if causal else len(theirs)
        if not num_seen:
            continue
        first, last = theirs[0], theirs[num_seen - 1]
        pair = AttentionSlice(q.local, q.local + q.count, first.local, last.local + last.count)
        before = found[-1] if found else None
        if before and (before.q_stop, before.k_start, before.k_stop) == (pair.q_start, pair.k_start, pair.k_stop):
            found[-1] = before._replace(q_stop=pair.q_stop)
        else:
            found.append(pair)
    return found


def band_pairs(
    queries: Rows, keys: Rows, bounds: Bounds, cu_seqlens: Sequence[int], sink_tokens: int
) -> list[AttentionSlice]:
    """Pairs between two ranks' segments, one for each two that meet, with their exact distances.

    Where the two step differently (a key layout of its own) i − j is no measure of distance; there each query row is a
    segment of its own.
    """
    found, span = [], keys.step
    for q in queries.segments if queries.step == span else _single_rows(queries):
        theirs = keys.of_document.get(q.document)
        if theirs is None:
            continue
        last_token = q.start + span * (q.count - 1)
        stop = len(theirs) if bounds.least is None else bisect_right(keys.starts[q.document], last_token - bounds.least)
        sink_end = cu_seqlens[q.document] + sink_tokens
        for k in reversed(theirs[:stop]):  # from the nearest back to the farthest that is seen
            if bounds.sinks:
                k = _first_tokens(k, sink_end, keys.step)
            elif bounds.most is not None and k.start + keys.step * (k.count - 1) < q.start - bounds.most:
                break
            pair = trim(_between(q, k, span, bounds))
            if pair is not None:
                found.append(pair)
    return found


def _single_rows(rows: Rows) -> list[Segment]:
    step = rows.step
    return [Segment(s.document, s.start + step * n, 1, s.local + n) for s in rows.segments for n in range(s.count)]


def _first_tokens(k: Segment, end: int, step: int) -> Segment:
    """The tokens of a segment before ``end``."""
    return k._replace(count=max(0, min(k.count, -((k.start - end) // step))))


def _between(q: Segment, k: Segment, step: int, bounds: Bounds) -> AttentionSlice:
    """Two segments under the bounds, before anything is trimmed."""
    offset = (q.start - step * q.local) - (k.start - step * k.local)
    lo = None if bounds.least is None else -((offset - bounds.least) // step)
    hi = None if bounds.most is None else (bounds.most - offset) // step
    return AttentionSlice(q.local, q.local + q.count, k.local, k.local + k.count, lo, hi, step, offset)


class Bands:
    """The pairs between two striped ranks, in columns: each has one segment of every document, and there are many."""

    def __init__(self, queries: Rows, keys: Rows, bounds: Sequence[Bounds], cu_seqlens: np.ndarray, sinks: int) -> None:
        self.step = keys.step
        parts = [meet(queries.columns, keys.columns, keys.step, b, cu_seqlens, sinks) for b in bounds]
        self.columns = np.concatenate(parts, axis=1)
        """q_start, q_stop, k_start, k_stop, lo, hi (±_OPEN for none) and offset of every pair."""

    def rows(self) -> tuple[tuple[int, int], ...]:
        """Ascending disjoint ranges of the key rows that some query sees."""
        if not self.columns.size:
            return ()
        order = np.argsort(self.columns[2], kind="stable")
        start, reach = self.columns[2][order], np.maximum.accumulate(self.columns[3][order])
        first = np.flatnonzero(np.append(True, start[1:] > reach[:-1]))
        last = np.append(first[1:], len(start)) - 1
        return tuple(zip(start[first].tolist(), reach[last].tolist(), strict=True))

    def pairs(self, rows: Sequence[tuple[int, int]] | None = None, first_query: int = 0) -> list[AttentionSlice]:
        """The pairs; with ``rows`` key rows are counted in these, packed, and query rows from ``first_query``."""
        k0 = self.columns[2]
        keys = np.zeros_like(k0)
        if rows is not None:
            starts, stops = np.array(rows, dtype=np.int64).reshape(-1, 2).T
            packed = np.cumsum(stops - starts) - (stops - starts)
            keys = (packed - starts)[np.searchsorted(starts, k0, side="right") - 1]
        return column_pairs(self.columns, -first_query, keys, self.step)


_OPEN = 2**62
"""Stands for a bound that is not there."""


def _shifted(bound: np.ndarray, by: np.ndarray) -> list[int | None]:
    """Bounds moved along with their rows, None where there is none."""
    moved: list[int | None] = (bound + by).tolist()
    for n in np.flatnonzero(np.abs(bound) == _OPEN).tolist():
        moved[n] = None
    return moved


def meet(
    queries: np.ndarray, keys: np.ndarray, step: int, bounds: Bounds, cu_seqlens: np.ndarray, sink_tokens: int
) -> np.ndarray:
    """``band_pairs`` and ``trim`` for two ranks that hold one segment of a document each, all documents at once.

    Takes columns as ``Rows.columns`` has them, returns those of ``Bands``.
    """
    _, near, far = np.intersect1d(queries[0], keys[0], assume_unique=True, return_indices=True)
    document, q_token, q_count, q = queries[:, near]
    _, k_token, k_count, k = keys[:, far]
    if bounds.sinks:
        k_count = np.clip(-((k_token - cu_seqlens[document] - sink_tokens) // step), 0, k_count)
    offset = (q_token - step * q) - (k_token - step * k)
    lo = np.full_like(q, -_OPEN) if bounds.least is None else -((offset - bounds.least) // step)
    hi = np.full_like(q, _OPEN) if bounds.most is None else (bounds.most - offset) // step
    q0, k1 = np.maximum(q, k + lo), np.minimum(k + k_count, q + q_count - lo)
    q1, k0 = np.minimum(q + q_count, k + k_count + hi), np.maximum(k, q - hi)
    some = (q0 < q1) & (k0 < k1) & (lo <= hi) & (k_count > 0)
    lo = np.where(lo <= q0 - (k1 - 1), -_OPEN, lo)
    hi = np.where(hi >= (q1 - 1) - k0, _OPEN, hi)
    return np.stack((q0, q1, k0, k1, lo, hi, offset))[:, some]


def column_pairs(columns: np.ndarray, queries: np.ndarray | int, keys: np.ndarray, step: int) -> list[AttentionSlice]:
    """What ``meet`` returned as pairs, query rows counted ``queries`` and key rows ``keys`` further on."""
    q0, q1, k0, k1, lo, hi, offset = columns
    by = queries - keys
    moved = (x.tolist() for x in (q0 + queries, q1 + queries, k0 + keys, k1 + keys))
    bounds = (_shifted(bound, by) for bound in (lo, hi))
    return list(map(AttentionSlice._make, zip(*moved, *bounds, repeat(step), (offset - step * by).tolist())))


def trim(pair: AttentionSlice) -> AttentionSlice | None:
    """The same work without rows that see nothing, keys that nobody sees and bounds that hold anyway; None if empty."""
    q0, q1, k0, k1, lo, hi = pair.q_start, pair.q_stop, pair.k_start, pair.k_stop, pair.lo, pair.hi
    if lo is not None:
        q0, k1 = max(q0, pair.k_start + lo), min(k1, pair.q_stop - lo)
    if hi is not None:
        q1, k0 = min(q1, pair.k_stop + hi), max(k0, pair.q_start - hi)
    if q0 >= q1 or k0 >= k1 or (lo is not None and hi is not None and lo > hi):
        return None
    if lo is not None and lo <= q0 - (k1 - 1):
        lo = None
    if hi is not None and hi >= (q1 - 1) - k0:
        hi = None
    return AttentionSlice(q0, q1, k0, k1, lo, hi, pair.step, pair.offset)


def area(pair: AttentionSlice) -> int:
    """Pairs of rows inside the band: a causal pair of n rows has n(n+1)/2."""
    n, m, first = pair.q_stop - pair.q_start, pair.k_stop - pair.k_start, pair.q_start - pair.k_start
    most = n * m if pair.hi is None else _at_most(n, m, pair.hi - first)
    return most if pair.lo is None else most - _at_most(n, m, pair.lo - 1 - first)


def _at_most(n: int, m: int, bound: int) -> int:
    """Places (i, j) of an n × m rectangle with i − j ≤ bound: row i has the keys from i − bound on."""

    def staircase(height: int) -> int:  # Σ max(0, height − i) over the n rows
        rows = max(0, min(n, height))
        return rows * height - rows * (rows - 1) // 2

    return staircase(m + bound) - staircase(bound)
