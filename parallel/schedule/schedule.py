"""``Schedule``: who computes what with whose keys. Pure; answers without a process.

A layout's *ring indices* are the groups of ranks that hold the same rows: single ranks, or the ``ulysses`` ranks that
share a ring index's rows by heads. For each two ring indices the schedule knows which rows of the owner travel to the
receiver (those that some query there sees, nothing else) and what the receiver computes with them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.slices import AttentionSlice, slice_table, table_slices
from longctx.model.attention.strided import Strided, reach
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.heads import AttentionShape, HeadSplit
from parallel.schedule.pairs import Bands, Bounds, Rows, area, band_pairs, mask_bounds, own_pairs, whole_pairs
from parallel.schedule.rows import Ranges, locate, num_rows, union
from parallel.schedule.strided import ClassRows, neighbours, strided_work

T = TypeVar("T")


@dataclass(frozen=True)
class Hop:
    """One ring index's work with one owner's keys."""

    owner: int
    """Ring index whose keys these are."""
    rows: Ranges
    """The owner's local rows that travel, in ascending order; the receiver sees them packed together."""
    queries: tuple[int, int]
    """Hull [start, stop) of the local query rows with work."""
    pairs: tuple[AttentionSlice, ...]
    """The work; query rows count from ``queries[0]``, key rows from the first packed row."""
    strided: Strided | None = None
    """What a stride adds to it, rows counted likewise."""

    @cached_property
    def slice_table(self) -> Tensor:
        """``pairs`` as a kernel takes them."""
        return slice_table(self.pairs)

    @property
    def num_rows(self) -> int:
        """Rows that travel."""
        return num_rows(self.rows)


@dataclass(frozen=True)
class Schedule:
    """The work of every rank for one layout, one set of documents and one mask."""

    layout: SequenceLayout
    key_layout: SequenceLayout
    """Where the keys live; the same as ``layout`` in self-attention."""
    cu_seqlens: tuple[int, ...]
    causal: bool
    window: int | None
    sink_tokens: int
    stride: int = 0
    distances: bool = False
    """Whether every pair tells its tokens' distance; without, pieces of a document are taken together."""
    _known: dict = field(default_factory=dict, compare=False, repr=False)
    """Rows by ring index and work by (receiver, owner), computed when first asked for."""

    @classmethod
    def build(
        cls,
        layout: SequenceLayout,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        causal: bool = True,
        window: int | None = None,
        sink_tokens: int = 0,
        key_layout: SequenceLayout | None = None,
        stride: int = 0,
    ) -> Schedule:
        """The schedule of a layout for documents that end at ``cu_seqlens`` (default: one document).

        A query sees the keys of its document with 0 ≤ i − j (any, when not causal), with a window those with
        0 ≤ i − j < window (|i − j| < window), and besides the document's first ``sink_tokens``, however far before it,
        or, if causal, those any multiple of ``stride`` before it.
        ConfigError when the boundaries do not ascend from 0 to the layout's token count, or the mask makes no sense.
        """
        bounds = [0, layout.num_tokens] if cu_seqlens is None else _as_list(cu_seqlens)
        _check_boundaries(bounds, layout.num_tokens)
        check_window(window, sink_tokens)
        check_stride(stride, window, sink_tokens, causal)
        keys = layout if key_layout is None else key_layout
        if (keys.num_tokens, keys.ring_degree) != (layout.num_tokens, layout.ring_degree):
            raise ConfigError(
                f"the keys' layout has {keys.num_tokens} tokens on {keys.ring_degree} ring indices, the queries' "
                f"{layout.num_tokens} on {layout.ring_degree}; both must agree."
            )
        if stride and keys != layout:
            raise ConfigError(f"stride={stride} wants queries and keys in one layout; leave key_layout out.")
        return cls(layout, keys, tuple(bounds), causal, window, sink_tokens, stride)

    def with_distances(self) -> Schedule:
        """The same schedule with each pair's distances, for scores that depend on them."""
        if self.distances:
            return self
        return self.cached("with distances", lambda: replace(self, distances=True, _known={}))

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """What ``build`` returned when it was first asked for under this key."""
        if key not in self._known:
            self._known[key] = build()
        return self._known[key]

    @cached_property
    def digest(self) -> str:
        """A fingerprint: ranks that share a sequence must have the same one."""
        layouts = [(x.kind, x.num_tokens, x.degree, x.ulysses, x.runs) for x in (self.layout, self.key_layout)]
        mask = (self.cu_seqlens, self.causal, self.window, self.sink_tokens, self.stride)
        return blake2b(repr((layouts, mask)).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Layout and mask on one line."""
        wishes = "" if self.window is None else f", window {self.window}, {self.sink_tokens} sink tokens"
        wishes += f", stride {self.stride}" if self.stride else ""
        kind = "causal" if self.causal else "bidirectional"
        x = self.layout
        return (
            f"{x.kind} layout of {x.num_tokens} tokens over {x.degree} ranks (ulysses {x.ulysses}), "
            f"{len(self.cu_seqlens) - 1} documents, {kind}{wishes}"
        )

    def hops(self, rank: int) -> tuple[Hop, ...]:
        """A rank's work; entry h meets the keys of the ring index h places before its own (entry 0: its own)."""
        ring = self.layout.ring_degree
        me = rank // self.layout.ulysses
        return tuple(self.hop(me, (me - h) % ring) for h in range(ring))

    def hop(self, receiver: int, owner: int) -> Hop:
        """The work of ring index ``receiver`` with the keys of ring index ``owner``."""
        return self.cached((receiver, owner), lambda: self._build_hop(receiver, owner))

    def pairs(self, rank: int) -> tuple[tuple[AttentionSlice, ...], ...]:
        """For each hop its pairs, query rows counted in the ring index's rows and key rows as they arrive.

        A stride's work is not in them: it counts rows in another order, see ``Hop.strided``.
        """
        return tuple(tuple(p.shifted(queries=hop.queries[0]) for p in hop.pairs) for hop in self.hops(rank))

    def pairs_in_place(self, receiver: int, owner: int) -> list[AttentionSlice]:
        """The work with both rows counted in the ring indices' own rows, as when all of the owner's rows are there."""
        if owner == receiver and self._plain and self.key_layout is self.layout:
            return own_pairs(self._rows(owner), self.causal)
        bands = self._bands(receiver, owner)
        if bands is not None:
            return bands.pairs()
        queries, keys = self._rows(receiver), self._rows(owner, keys=True)
        if self._plain and queries.step == keys.step == 1 and self.key_layout is self.layout:
            return whole_pairs(queries, keys, self.causal)
        return [p for b in self._bounds for p in band_pairs(queries, keys, b, self.cu_seqlens, self.sink_tokens)]

    def strided_in_place(self, receiver: int, owner: int) -> Strided | None:
        """What a stride adds to ``pairs_in_place``, rows counted likewise; None where it adds nothing."""
        if not self.stride:
            return None
        queries, keys = self._classes(receiver), self._classes(owner, keys=True)
        return self.cached(("strided", receiver, owner), lambda: strided_work(queries, keys))

    def rows_needed(self, receiver: int, owner: int) -> Ranges:
        """The owner's local rows that some query of the receiver sees: the rows of their ``hop``, without the work."""
        bands = None if receiver == owner or self.stride else self._bands(receiver, owner)
        if bands is None:
            return self.hop(receiver, owner).rows
        return self.cached(("rows", receiver, owner), bands.rows)

    def rows_received(self, rank: int) -> int:
        """Key/value rows that travel to a rank's ring index from the others."""
        return sum(hop.num_rows for hop in self.hops(rank)[1:])

    def rows_to_node(self, owner: int, receivers: Sequence[int]) -> Ranges:
        """The owner's rows that at least one of these ring indices needs: what crosses to their node, once."""
        return self.cached(
            ("to node", owner, *receivers), lambda: union([r for x in receivers for r in self.rows_needed(x, owner)])
        )

    def work(self, rank: int) -> int:
        """Query-key pairs of tokens that a rank's ring index computes, for each head."""
        strided = [table_slices(hop.strided.slices) for hop in self.hops(rank) if hop.strided is not None]
        return sum(area(pair) for pairs in (*self.pairs(rank), *strided) for pair in pairs)

    def imbalance(self) -> float:
        """Most work on a ring index over the mean: 1.0 when attention is even."""
        u = self.layout.ulysses
        work = [self.work(rank) for rank in range(0, self.layout.degree, u)]
        return max(work) * len(work) / sum(work)

    def flops(self, rank: int, shape: AttentionShape) -> int:
        """Floating-point operations of a rank's forward pass, 2·(D + V) a pair and head; backward takes 2.5 × that."""
        heads = HeadSplit.build(shape.num_heads, shape.num_kv_heads, self.layout.ulysses)
        start, stop = heads.queries[rank % self.layout.ulysses]
        return 2 * (stop - start) * shape.key_and_value_dim * self.work(rank)

    def bytes_received(
        self, rank: int, shape: AttentionShape, transport: str = "p2p", ranks_per_node: int | None = None
    ) -> int:
        """Bytes that a rank receives in a forward pass: rows of keys and values, and heads where Ulysses trades them.

        ``p2p`` brings the rows that are needed, ``all_gather`` all rows, ``two_level`` what is needed plus, at the rank
        that hands rows round in its node (of ``ranks_per_node`` ring indices), what it passes on and does not need.
        """
        u = self.layout.ulysses
        split = HeadSplit.build(shape.num_heads, shape.num_kv_heads, u)
        start, stop = split.keys[rank % u]
        rows = self._rows_arriving(rank // u, transport, ranks_per_node)
        ring = rows * (stop - start) * shape.key_and_value_dim * shape.bytes_per_value
        return ring + split.bytes_received(rank % u, self.layout.num_local(rank), shape.bytes_per_value, shape)

    def _rows_arriving(self, ring_index: int, transport: str, ranks_per_node: int | None) -> int:
        rank = ring_index * self.layout.ulysses
        if transport == "p2p":
            return self.rows_received(rank)
        if transport == "all_gather":
            return self.key_layout.num_tokens - self.key_layout.num_ring(ring_index)
        if transport != "two_level":
            raise ConfigError(f"parallel.transport={transport!r} is unknown. Try p2p, two_level or all_gather.")
        return sum(self.rows_by_link(ring_index, ranks_per_node or self.layout.ring_degree))

    def rows_by_link(self, ring_index: int, ranks_per_node: int) -> tuple[int, int]:
        """(rows within the node, rows from other nodes) that ``two_level`` brings to a ring index."""
        G = ranks_per_node
        node, place = divmod(ring_index, G)
        here = range(node * G, node * G + G)
        within = across = 0
        for owner in range(self.layout.ring_degree):
            if owner == ring_index:
                continue
            if owner // G == node or owner % G != place:  # from a neighbour: its own rows, or rows it received
                within += self.hop(ring_index, owner).num_rows
            else:
                across += num_rows(self.rows_to_node(owner, here))
        return within, across

    @property
    def _plain(self) -> bool:
        return self.window is None and not self.distances

    @cached_property
    def _bounds(self) -> tuple[Bounds, ...]:
        return mask_bounds(causal=self.causal, window=self.window, sink_tokens=self.sink_tokens)

    @cached_property
    def _boundaries(self) -> np.ndarray:
        return np.array(self.cu_seqlens)

    def _rows(self, ring_index: int, *, keys: bool = False) -> Rows:
        name = (ring_index, "keys" if keys and self.key_layout is not self.layout else "queries")
        layout = self.key_layout if keys else self.layout
        return self.cached(
            name,
            lambda: Rows(layout.runs[ring_index], self.cu_seqlens if layout.runs[0][0].step == 1 else self._boundaries),
        )

    def _classes(self, ring_index: int, *, keys: bool = False) -> ClassRows:
        assert self.window is not None
        runs, back = (self.key_layout if keys else self.layout).runs[ring_index], reach(self.window, self.stride)
        return self.cached(
            ("classes", ring_index, keys), lambda: ClassRows(runs, self.cu_seqlens, self.stride, back, keys=keys)
        )

    def _bands(self, receiver: int, owner: int) -> Bands | None:
        """The work in columns, between two ring indices that have a segment of each of many documents."""
        queries, keys = self._rows(receiver), self._rows(owner, keys=True)
        if queries.step != keys.step or keys.step == 1:
            return None
        return self.cached(
            ("bands", receiver, owner),
            lambda: Bands(queries, keys, self._bounds, self._boundaries, self.sink_tokens),
        )

    def _build_hop(self, receiver: int, owner: int) -> Hop:
        bands = None if receiver == owner or self.stride else self._bands(receiver, owner)
        if bands is not None and bands.columns.size:
            rows, queries = bands.rows(), (int(bands.columns[0].min()), int(bands.columns[1].max()))
            return Hop(owner, rows, queries, tuple(bands.pairs(rows, queries[0])))
        found = self.pairs_in_place(receiver, owner)
        strided = self.strided_in_place(receiver, owner)
        if receiver == owner:  # own rows stay where they are
            own = (0, self.key_layout.num_ring(owner))
            return Hop(owner, (own,), (0, self.layout.num_ring(owner)), tuple(found), strided)
        if not found and strided is None:
            return Hop(owner, (), (0, 0), ())
        keys, queries = [(p.k_start, p.k_stop) for p in found], [(p.q_start, p.q_stop) for p in found]
        if strided is not None:
            keys += neighbours(strided.keys_m)
            queries.append((int(strided.queries_n.min()), int(strided.queries_n.max()) + 1))
        rows, hull = union(keys), (min(start for start, _ in queries), max(stop for _, stop in queries))
        packed = None if strided is None else _packed_rows(strided, rows, -hull[0])
        return Hop(owner, rows, hull, tuple(_packed(found, rows, -hull[0])), packed)


def check_window(window: int | None, sink_tokens: int) -> None:
    """ConfigError unless the two make a mask."""
    if window is not None and window < 1:
        raise ConfigError(f"window={window} must be at least 1 (a query sees itself), or None for no window.")
    if sink_tokens < 0 or (sink_tokens and window is None):
        raise ConfigError(
            f"sink_tokens={sink_tokens} are a document's first tokens, seen from beyond the window; "
            f"window={window}. Give a window, and at least 0 sink tokens."
        )


def check_stride(stride: int, window: int | None, sink_tokens: int, causal: bool) -> None:
    """ConfigError unless a stride goes with the rest of the mask."""
    if stride < 0 or (stride and (window is None or sink_tokens or not causal)):
        raise ConfigError(
            f"stride={stride} (0 for none) needs a window and causal attention, and goes with no sink tokens; got "
            f"window={window}, causal={causal}, sink_tokens={sink_tokens}."
        )


def _packed(pairs: Sequence[AttentionSlice], rows: Ranges, by_queries: int) -> list[AttentionSlice]:
    """The pairs with key rows counted in the packed rows that travel."""
    starts = [start for start, _ in rows]
    shifts = [packed - start for (start, _), (packed, _) in zip(rows, locate(rows, rows), strict=True)]
    return [p.shifted(queries=by_queries, keys=shifts[bisect_right(starts, p.k_start) - 1]) for p in pairs]


def _packed_rows(strided: Strided, rows: Ranges, by_queries: int) -> Strided:
    """The same for work that names its rows one by one."""
    start, stop = torch.tensor(rows).T.contiguous()
    shift = (stop - start).cumsum(0) - stop  # of a range: packed rows before it, less its start
    keys = strided.keys_m + shift[torch.bucketize(strided.keys_m, start, right=True) - 1]
    return strided._replace(queries_n=strided.queries_n + by_queries, keys_m=keys)


def _as_list(cu_seqlens: Sequence[int] | Tensor) -> list[int]:
    return cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)


def _check_boundaries(bounds: Sequence[int], num_tokens: int) -> None:
    falls = next((n for n in range(1, len(bounds)) if bounds[n] < bounds[n - 1]), None)
    if bounds and bounds[0] == 0 and bounds[-1] == num_tokens and falls is None:
        return
    where = "" if falls is None else f" Entry {falls} is {bounds[falls]}, after {bounds[falls - 1]}."
    shown = list(bounds) if len(bounds) <= 6 else f"{list(bounds[:4])}…{list(bounds[-2:])}"
    raise ConfigError(
        f"cu_seqlens must ascend from 0 to the sequence's {num_tokens} tokens; got {shown} ({len(bounds)} entries)."
        f"{where}"
    )
