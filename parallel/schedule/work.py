"""Work of one rank with the keys of another, and the rows that are sent for it. Pure.

*Local* work counts the rows of both ranks as the ranks hold them. A hop counts key rows as they arrive, packed
together, and query rows from the first that has work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy import ndarray

from longctx.kernels.attention.slices import K_START, K_STOP, Q_START, Q_STOP
from longctx.model.attention.strided import reach
from longctx.model.attention.work import EVERY_ROW, Work
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.bands import (
    NO_SLICES,
    Bounds,
    band_slices,
    mask_bounds,
    meeting_segments,
    own_slices,
    prefix_slices,
    shift_slices,
)
from parallel.schedule.rows import RowRanges, union
from parallel.schedule.segments import Segments, cut_segments, segments_of_all
from parallel.schedule.strided import ClassSegments, StridedWork, sort_by_class, strided_work

T = TypeVar("T")


class Mask(NamedTuple):
    """Mask of the keys of its document that a query sees; see ``Schedule.build``."""

    causal: bool
    window: int | None
    sink_tokens: int
    stride: int


@dataclass(frozen=True)
class Hop:
    """Work of one ring rank with one owner's keys."""

    owner: int
    """Ring rank whose keys these are."""
    rows: RowRanges
    """The owner's local rows that travel, in ascending order; the receiver sees them packed together."""
    queries: tuple[int, int]
    """Hull [start, stop) of the local query rows with work."""
    work: tuple[Work, ...]
    """Query rows count from ``queries[0]``, key rows from the first packed row. The first entry covers all of them with
    the mask's bands, the others gather rows for a stride; empty where no query sees a key."""

    @property
    def num_rows(self) -> int:
        """Number of rows that are sent."""
        return self.rows.num_rows


class Partners(NamedTuple):
    """Ring ranks that a ring rank may exchange rows with; it never does with any other."""

    ring_rank: int
    degree: int
    owners: frozenset[int]
    """Others with a key that some query of the ring rank may see."""
    receivers: frozenset[int]
    """Others with a query that may see some key of the ring rank."""
    are_known: bool = True
    """False where nobody has looked: then they are all others."""

    @property
    def hops(self) -> list[int]:
        """Hops, from 1, in which the ring rank may receive or send; its keys' owner is so many ranks before it."""
        receives = {(self.ring_rank - owner) % self.degree for owner in self.owners}
        sends = {(receiver - self.ring_rank) % self.degree for receiver in self.receivers}
        return sorted(receives | sends)


@dataclass(frozen=True)
class RingWork:
    """Work between every two ring ranks, each built once, when it is first needed."""

    layout: SequenceLayout
    key_layout: SequenceLayout
    """Where the keys live; the same as ``layout`` in self-attention."""
    cu_seqlens: tuple[int, ...]
    causal: bool
    window: int | None
    sink_tokens: int
    stride: int = 0
    distances: bool = False
    """Whether every slice tells its tokens' distance; without, pieces of a document are taken together."""
    key_cu_seqlens: tuple[int, ...] | None = None
    """The keys' own documents, in cross attention: a query sees all keys of the document with its own's number."""
    _built: dict = field(default_factory=dict, init=False, compare=False, repr=False)

    def hop(self, receiver: int, owner: int) -> Hop:
        """Return the work of ring rank ``receiver`` with the keys of ring rank ``owner``."""
        return self._once(("hop", receiver, owner), lambda: self._build_hop(receiver, owner))

    def rows_needed(self, receiver: int, owner: int) -> RowRanges:
        """Return the owner's local rows that some query of the receiver sees: those of their ``hop``, not its work."""
        if receiver == owner or ("hop", receiver, owner) in self._built:
            return self.hop(receiver, owner).rows

        # The sending rank needs only the rows to send: half the cost of building a hop.
        def build() -> RowRanges:
            slices, strided = self._local_work(receiver, owner)
            return rows_seen(slices, strided)

        return self._once(("rows", receiver, owner), build)

    def partners(self, ring_rank: int) -> Partners:
        """Return the ring ranks that a ring rank may receive rows from or send some to, by two searches over all."""
        return self._once(("partners", ring_rank), lambda: self._find_partners(ring_rank))

    def rows_to_node(self, owner: int, receivers: Sequence[int]) -> RowRanges:
        """Return the owner's rows that at least one of these ring ranks needs: they cross to their node once."""
        return self._once(
            ("to node", owner, tuple(receivers)),
            lambda: RowRanges.union([self.rows_needed(receiver, owner) for receiver in receivers]),
        )

    def gathered_work(self, receiver: int) -> tuple[Work, ...]:
        """Return the work with the keys of all other ring ranks, among the concatenated keys of all."""
        return self._once(("gathered", receiver), lambda: self._build_gathered(receiver))

    def _build_hop(self, receiver: int, owner: int) -> Hop:
        slices, strided = self._local_work(receiver, owner)
        if receiver == owner:
            # A rank's own rows are not packed: they stay in place.
            rows, queries = RowRanges.whole(self.key_layout.num_ring(owner)), (0, self.layout.num_ring(owner))
            return Hop(owner, rows, queries, entries(slices, strided))
        return other_hop(owner, slices, strided)

    def _build_gathered(self, receiver: int) -> tuple[Work, ...]:
        slices, strided = [NO_SLICES], []
        for owner in range(self.layout.ring_degree):
            if owner == receiver:
                continue
            # All ranks hold equally many rows, so the gathered ones of an owner begin at a multiple of that.
            first_row = owner * self.key_layout.num_ring(owner)
            of_owner, owner_strided = self._local_work(receiver, owner)
            slices.append(shift_slices(of_owner, keys=first_row))
            strided += [part.shifted(keys=first_row) for part in owner_strided]
        return entries(np.concatenate(slices), strided)

    def _local_work(self, receiver: int, owner: int) -> tuple[ndarray, list[StridedWork]]:
        """Return the slices of the mask's bands, and the work that a stride adds to them."""
        if not self._may_meet(receiver, owner):
            return NO_SLICES, []
        queries, keys = self._segments(receiver), self._segments(owner, keys=True)
        if self.key_cu_seqlens is not None:
            return prefix_slices(queries, keys, causal=False), []
        mask = Mask(self.causal, self.window, self.sink_tokens, self.stride)
        joined = self.key_layout is self.layout and not self.distances
        slices = local_slices(queries, keys, mask, self._boundaries, own=receiver == owner, joined=joined)
        strided = []
        if self.stride:
            for bounds in strided_bounds(mask):
                # Of a query and the keys before it, the query is the later one.
                ahead = bounds.least is None
                query_classes = self._classes(receiver, early=ahead)
                key_classes = self._classes(owner, early=not ahead, keys=True)
                strided.append(strided_work(query_classes, key_classes, bounds))
        return slices, [part for part in strided if part is not None]

    def _may_meet(self, receiver: int, owner: int) -> bool:
        """Return whether a query of the receiver may see a key of the owner: False for most ranks of many documents."""
        if receiver == owner:
            return True
        # Known if one of the two has looked up all its partners at once.
        for_receiver, for_owner = self._built.get(("partners", receiver)), self._built.get(("partners", owner))
        if for_receiver is not None and for_receiver.are_known:
            return owner in for_receiver.owners
        if for_owner is not None and for_owner.are_known:
            return receiver in for_owner.receivers
        return self._segments(receiver).may_meet(self._segments(owner, keys=True))

    def _find_partners(self, ring_rank: int) -> Partners:
        degree, one_layout = self.layout.ring_degree, self.key_layout is self.layout
        is_cross = self.key_cu_seqlens is not None
        steps = {layout.runs[ring_rank][0].step for layout in (self.layout, self.key_layout)}
        # Striped tokens would be as many segments as documents times ranks; a stride is seen in another order.
        if steps != {1} or self.stride or not (one_layout or is_cross):
            everyone = frozenset(range(degree)) - {ring_rank}
            return Partners(ring_rank, degree, everyone, everyone, are_known=False)
        all_keys, owner_of = self._all_segments(keys=True)
        all_queries, receiver_of = self._all_segments()
        owners: set[int] = set()
        receivers: set[int] = set()
        for bounds in mask_bounds(causal=self.causal, window=self.window, sink_tokens=self.sink_tokens):
            _, keys = meeting_segments(self._segments(ring_rank), all_keys, bounds)
            queries, _ = meeting_segments(all_queries, self._segments(ring_rank, keys=True), bounds)
            owners.update(owner_of[keys].tolist())
            receivers.update(receiver_of[queries].tolist())
        return Partners(ring_rank, degree, frozenset(owners) - {ring_rank}, frozenset(receivers) - {ring_rank})

    def _all_segments(self, *, keys: bool = False) -> tuple[Segments, ndarray]:
        side, layout, boundaries = self._side(keys=keys)
        return self._once(("all", side), lambda: segments_of_all(layout, boundaries))

    @cached_property
    def _boundaries(self) -> ndarray:
        return np.array(self.cu_seqlens)

    def _side(self, *, keys: bool) -> tuple[str, SequenceLayout, ndarray]:
        """Return the name of a side, its layout and its documents."""
        # Keys in the layout of the queries have the same segments: both sides then find the same entry.
        if not keys or (self.key_cu_seqlens is None and self.key_layout is self.layout):
            return "queries", self.layout, self._boundaries
        return "keys", self.key_layout, np.array(self.key_cu_seqlens or self.cu_seqlens)

    def _segments(self, ring_rank: int, *, keys: bool = False) -> Segments:
        side, layout, boundaries = self._side(keys=keys)
        return self._once((side, ring_rank), lambda: cut_segments(layout.runs[ring_rank], boundaries))

    def _classes(self, ring_rank: int, *, early: bool, keys: bool = False) -> ClassSegments:
        segments, window = self._segments(ring_rank, keys=keys), self.window
        assert window is not None
        return self._once(
            ("classes", ring_rank, early, keys),
            lambda: sort_by_class(segments, self._boundaries, self.stride, reach(window, self.stride), early=early),
        )

    def _once(self, key: Hashable, build: Callable[[], T]) -> T:
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]


def local_slices(
    queries: Segments, keys: Segments, mask: Mask, boundaries: ndarray, *, own: bool, joined: bool
) -> ndarray:
    """Return the bands of a mask between the local rows of two ranks, or within one (``own``).

    ``joined`` joins pieces of a document if that changes nothing: both ranks in one layout, no window, and no need for
    distances.
    """
    # Without a window a band is full or causal, so one slice serves all pieces of a document: far fewer kernel calls.
    joined = joined and mask.window is None
    if joined and own:
        return own_slices(queries, mask.causal)
    if joined and queries.step == keys.step == 1:
        return prefix_slices(queries, keys, mask.causal)
    bounds = mask_bounds(causal=mask.causal, window=mask.window, sink_tokens=mask.sink_tokens)
    sink_ends = boundaries[:-1] + mask.sink_tokens
    return np.concatenate([band_slices(queries, keys, b, sink_ends) for b in bounds])


def strided_bounds(mask: Mask) -> tuple[Bounds, ...]:
    """Return the bounds of the tokens that a stride adds to a mask's window, on each side that queries see."""
    assert mask.window is not None
    # Nearer tokens are in the window, which the dense slices have already.
    back = reach(mask.window, mask.stride)
    if mask.causal:
        return (Bounds(back, None),)
    return Bounds(back, None), Bounds(None, -back)


def other_hop(owner: int, slices: ndarray, strided: Sequence[StridedWork]) -> Hop:
    """Return a rank's work with another's keys, from their local work."""
    rows = rows_seen(slices, strided)
    if not rows:
        return Hop(owner, rows, (0, 0), ())
    # The kernel gets the query rows between the first and the last with work, and the key rows that were sent.
    first, stop = _query_hull(slices, strided)
    slices = shift_slices(slices, -first, rows.packing_shifts(slices[:, K_START]))
    strided = [part.shifted(-first, rows.packing_shifts(part.key_rows)) for part in strided]
    return Hop(owner, rows, (first, stop), entries(slices, strided))


def rows_seen(slices: ndarray, strided: Sequence[StridedWork]) -> RowRanges:
    """Return the owner's rows that some query sees: the key rows of local work."""
    starts, stops = slices[:, K_START], slices[:, K_STOP]
    for part in strided:
        starts, stops = np.append(starts, part.key_rows), np.append(stops, part.key_rows + 1)
    return union(starts, stops)


def entries(slices: ndarray, strided: Sequence[StridedWork]) -> tuple[Work, ...]:
    """Return the bands' entry for all rows, then the entries that gather."""
    work = [Work(EVERY_ROW, EVERY_ROW, torch.from_numpy(slices))]
    for part in strided:
        work.append(part.entry())
    return tuple(work)


def _query_hull(slices: ndarray, strided: Sequence[StridedWork]) -> tuple[int, int]:
    starts, stops = slices[:, Q_START], slices[:, Q_STOP]
    for part in strided:
        starts, stops = np.append(starts, part.query_rows), np.append(stops, part.query_rows + 1)
    return int(starts.min()), int(stops.max())
