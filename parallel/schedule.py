"""``Schedule``: who computes what with whose keys, hop by hop. Pure; answers without a process.

In hop h a rank meets the keys of the rank h places before it (hop 0: its own). Only rows that some query of the
receiver needs travel, straight from their owner; a hop without work has neither rows nor pairs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.contract import Pair
from parallel.layout import Ranges, SequenceLayout


class Segment(NamedTuple):
    """A piece of one document on one rank: global tokens [start, stop), from local row ``local``."""

    document: int
    start: int
    stop: int
    local: int


@dataclass(frozen=True)
class Hop:
    """One rank's work with one owner's keys."""

    owner: int
    """Rank (within the layout) whose keys these are."""
    rows: Ranges
    """The owner's local rows that travel, in ascending order; the receiver sees them packed together."""
    queries: tuple[int, int]
    """Hull [start, stop) of the local query rows with work."""
    pairs: tuple[Pair, ...]
    """The work; query rows count from ``queries[0]``, key rows from the first packed row."""

    @property
    def num_rows(self) -> int:
        """Rows that travel."""
        return sum(stop - start for start, stop in self.rows)


class AttentionShape(NamedTuple):
    """What turns rows into bytes and pairs into floating-point operations."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    bytes_per_value: int


@dataclass(frozen=True)
class Schedule:
    """The work of every rank for one layout, one set of documents and one mask."""

    layout: SequenceLayout
    cu_seqlens: tuple[int, ...]
    causal: bool
    _known: dict = field(default_factory=dict, compare=False, repr=False)
    """Segments by rank and hops by (rank, owner), computed when first asked for."""

    @classmethod
    def build(
        cls,
        layout: SequenceLayout,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        causal: bool = True,
        window: int | None = None,
        sink_tokens: int = 0,
        key_layout: SequenceLayout | None = None,
    ) -> Schedule:
        """The schedule of a layout for documents that end at ``cu_seqlens`` (default: one document).

        ConfigError when the boundaries are not ascending from 0 to the layout's token count.
        """
        if window is not None or sink_tokens or key_layout is not None:
            raise ConfigError("windows, sink tokens and a key layout of its own are not built yet.")
        bounds = [0, layout.num_tokens] if cu_seqlens is None else _as_list(cu_seqlens)
        if bounds[:1] != [0] or bounds[-1] != layout.num_tokens or any(b < a for a, b in zip(bounds, bounds[1:])):  # noqa: B905, RUF007
            raise ConfigError(
                f"cu_seqlens must ascend from 0 to the sequence's {layout.num_tokens} tokens; "
                f"got {bounds[:4]}…{bounds[-2:]} ({len(bounds)} entries)."
            )
        return cls(layout, tuple(bounds), causal)

    def hops(self, rank: int) -> tuple[Hop, ...]:
        """The rank's work in the order it is done; hop h meets the keys of rank − h."""
        return tuple(self.hop(rank, h) for h in range(self.layout.degree))

    def hop(self, rank: int, hop: int) -> Hop:
        """The rank's work with the keys of the rank ``hop`` places before it."""
        key = (rank, (rank - hop) % self.layout.degree)
        if key not in self._known:
            self._known[key] = _build_hop(self, *key)
        return self._known[key]

    def pairs(self, rank: int) -> tuple[tuple[Pair, ...], ...]:
        """For each hop its pairs, query rows counted in the rank's local rows and key rows as they arrive."""
        return tuple(tuple(_shift_queries(p, hop.queries[0]) for p in hop.pairs) for hop in self.hops(rank))

    def segments(self, rank: int) -> tuple[Segment, ...]:
        """The rank's rows cut at document boundaries, in local (and global) order."""
        if rank not in self._known:
            self._known[rank] = _cut_segments(self, rank)
        return self._known[rank]

    def rows_received(self, rank: int) -> int:
        """Key/value rows that travel to the rank."""
        return sum(hop.num_rows for hop in self.hops(rank)[1:])

    def work(self, rank: int) -> int:
        """Query-key pairs of tokens that the rank computes."""
        return sum(_area(pair) for pairs in self.pairs(rank) for pair in pairs)

    def imbalance(self) -> float:
        """Most work on a rank over the mean: 1.0 when attention is even."""
        work = [self.work(rank) for rank in range(self.layout.degree)]
        return max(work) * len(work) / sum(work)

    def flops(self, rank: int, shape: AttentionShape) -> int:
        """Floating-point operations of the rank's forward pass, 4·H·D a pair of tokens; backward takes 2.5 × that."""
        return 4 * shape.num_heads * shape.head_dim * self.work(rank)

    def bytes_received(self, rank: int, shape: AttentionShape, transport: str = "p2p") -> int:
        """Bytes of keys and values that the rank receives in a forward pass."""
        if transport != "p2p":
            raise ConfigError(f"parallel.transport={transport!r} is not built yet. Use p2p.")
        return self.rows_received(rank) * 2 * shape.num_kv_heads * shape.head_dim * shape.bytes_per_value


def _as_list(cu_seqlens: Sequence[int] | Tensor) -> list[int]:
    return cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)


def _cut_segments(schedule: Schedule, rank: int) -> tuple[Segment, ...]:
    segments, local, cu = [], 0, schedule.cu_seqlens
    for start, stop in schedule.layout.ranges[rank]:
        while start < stop:
            document = bisect_right(cu, start) - 1
            end = min(stop, cu[document + 1])
            segments.append(Segment(document, start, end, local))
            local += end - start
            start = end
    return tuple(segments)


def _build_hop(schedule: Schedule, rank: int, owner: int) -> Hop:
    found = _own_pairs(schedule, rank) if owner == rank else _remote_pairs(schedule, rank, owner)
    if not found:
        return Hop(owner, (), (0, 0), ())
    rows = ((0, schedule.layout.num_local(rank)),) if owner == rank else _union([(p.k_start, p.k_stop) for p in found])
    queries = (min(p.q_start for p in found), max(p.q_stop for p in found))
    pairs = (_shift_queries(_pack_keys(p, rows), -queries[0]) for p in found)
    return Hop(owner, rows, queries, tuple(pairs))


def _own_pairs(schedule: Schedule, rank: int) -> list[Pair]:
    """One pair a document: a document's rows on a rank are neighbours in ascending order, so causality is local."""
    hulls: dict[int, tuple[int, int]] = {}
    for s in schedule.segments(rank):
        first, _ = hulls.get(s.document, (s.local, 0))
        hulls[s.document] = (first, s.local + s.stop - s.start)
    return [Pair(a, b, a, b, lo=0 if schedule.causal else None) for a, b in hulls.values()]


def _remote_pairs(schedule: Schedule, rank: int, owner: int) -> list[Pair]:
    """Full rectangles only: ranges of two ranks never overlap, so a segment lies wholly before another or after it."""
    keys: dict[int, list[Segment]] = {}
    for s in schedule.segments(owner):
        keys.setdefault(s.document, []).append(s)
    pairs: list[Pair] = []
    for q in schedule.segments(rank):
        seen = [k for k in keys.get(q.document, ()) if not schedule.causal or k.stop <= q.start]
        if not seen:
            continue
        pair = Pair(q.local, q.local + q.stop - q.start, seen[0].local, seen[-1].local + seen[-1].stop - seen[-1].start)
        last = pairs[-1] if pairs else None
        if last and (last.q_stop, last.k_start, last.k_stop) == (pair.q_start, pair.k_start, pair.k_stop):
            pairs[-1] = replace(last, q_stop=pair.q_stop)
        else:
            pairs.append(pair)
    return pairs


def _union(ranges: list[tuple[int, int]]) -> Ranges:
    """Ascending disjoint ranges that cover the same rows."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return tuple(merged)


def _pack_keys(pair: Pair, rows: Ranges) -> Pair:
    """The pair with key rows counted in the packed rows that travel; only pairs without a band move."""
    packed = 0
    for start, stop in rows:
        if start <= pair.k_start < stop:
            moved = packed - start
            return pair if not moved else replace(pair, k_start=pair.k_start + moved, k_stop=pair.k_stop + moved)
        packed += stop - start
    raise AssertionError(f"{pair} is not among the rows {rows}")


def _shift_queries(pair: Pair, by: int) -> Pair:
    lo, hi = (None if bound is None else bound + by for bound in (pair.lo, pair.hi))
    return replace(pair, q_start=pair.q_start + by, q_stop=pair.q_stop + by, lo=lo, hi=hi)


def _area(pair: Pair) -> int:
    """Pairs of rows inside the band: a causal pair of n rows has n(n+1)/2."""
    n, m = pair.q_stop - pair.q_start, pair.k_stop - pair.k_start
    if pair.lo is None:
        return n * m
    first = pair.q_start - pair.lo - pair.k_start + 1  # keys that the first query sees
    return sum(max(0, min(m, first + i)) for i in range(n)) if first != 1 or n != m else n * (n + 1) // 2
