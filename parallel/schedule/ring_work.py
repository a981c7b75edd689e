"""One rank's work with another rank's keys, and the rows that must be sent for it. Pure.

*Local* work uses both ranks' local row indices. A hop counts key rows as received, packed together, and query rows from
the first one with work.
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
from longctx.model.attention.attention_work import EVERY_ROW, Work
from longctx.model.attention.strided import class_lookback
from parallel.layout.sequence import SequenceLayout
from parallel.schedule.bands import (
    NO_SLICES,
    Bounds,
    band_slices,
    mask_bounds,
    overlapping_segments,
    own_slices,
    prefix_slices,
    shift_slices,
)
from parallel.schedule.document_segments import DocumentSegments, cut_segments, segments_of_all
from parallel.schedule.row_ranges import RowRanges, union
from parallel.schedule.strided_pairs import ClassSegments, StridedWork, build_strided_work, sort_by_class

T = TypeVar("T")


class Mask(NamedTuple):
    """Which keys in its document a query sees; see ``Schedule.build``."""

    causal: bool
    window: int | None
    sink_tokens: int
    stride: int


@dataclass(frozen=True)
class Hop:
    """One ring rank's work with one owner's keys."""

    owner: int
    """Ring rank that owns the keys."""
    rows: RowRanges
    """The owner's local rows to send, ascending; the receiver gets them packed together."""
    queries: tuple[int, int]
    """Hull [start, stop) around the local query rows with work."""
    work: tuple[Work, ...]
    """Query rows count from ``queries[0]``, key rows from the first packed row. The first entry covers all rows with
    the mask's bands, the others gather rows for a stride; empty if no query sees a key."""

    @property
    def num_rows(self) -> int:
        """Number of rows sent."""
        return self.rows.num_rows


class Partners(NamedTuple):
    """Ring ranks with which a ring rank may exchange rows."""

    ring_rank: int
    degree: int
    kv_ranks: frozenset[int]
    """Other ring ranks with a key that some local query may see."""
    receivers: frozenset[int]
    """Other ring ranks with a query that may see some local key."""
    are_known: bool = True
    """False if the search was skipped; owners and receivers are then all other ranks."""

    @property
    def hops(self) -> list[int]:
        """Hops, from 1, in which the ring rank may receive or send; at hop h it uses keys owned h ranks before it."""
        receives = {(self.ring_rank - owner) % self.degree for owner in self.kv_ranks}
        sends = {(receiver - self.ring_rank) % self.degree for receiver in self.receivers}
        return sorted(receives | sends)


@dataclass(frozen=True)
class RingWork:
    """Work between every pair of ring ranks; each entry is built once, on first use."""

    layout: SequenceLayout
    key_layout: SequenceLayout
    """Placement of keys; the same as ``layout`` in self-attention."""
    cu_seqlens: tuple[int, ...]
    causal: bool
    window: int | None
    sink_tokens: int
    stride: int = 0
    relative_positions: bool = False
    """True if every slice stores its tokens' distance; otherwise segments in one document are merged."""
    key_cu_seqlens: tuple[int, ...] | None = None
    """The keys' documents in cross attention: a query sees all keys in the document with its own document's index."""
    _built: dict = field(default_factory=dict, init=False, compare=False, repr=False)

    def hop(self, receiver: int, owner: int) -> Hop:
        """Return ring rank ``receiver``'s work with ring rank ``owner``'s keys."""
        return self._once(("hop", receiver, owner), lambda: self._build_hop(receiver, owner))

    def rows_needed(self, receiver: int, owner: int) -> RowRanges:
        """Return the owner's local rows that some receiver query sees: the rows of their ``hop``, without its work."""
        if receiver == owner or ("hop", receiver, owner) in self._built:
            return self.hop(receiver, owner).rows

        # A sender needs only the rows, at half the cost of a hop.
        def build() -> RowRanges:
            slices, strided = self._local_work(receiver, owner)
            return rows_seen(slices, strided)

        return self._once(("rows", receiver, owner), build)

    def partners(self, ring_rank: int) -> Partners:
        """Return the ring ranks with which a ring rank may exchange rows, from two searches over all segments."""
        return self._once(("partners", ring_rank), lambda: self._find_partners(ring_rank))

    def rows_to_node(self, owner: int, receivers: Sequence[int]) -> RowRanges:
        """Return the owner's rows that at least one receiver needs: they cross to the receivers' node once."""
        return self._once(
            ("to node", owner, tuple(receivers)),
            lambda: RowRanges.union([self.rows_needed(receiver, owner) for receiver in receivers]),
        )

    def gathered_work(self, receiver: int) -> tuple[Work, ...]:
        """Return the work with all other ring ranks' keys, indexed into the all-gathered keys."""
        return self._once(("gathered", receiver), lambda: self._build_gathered(receiver))

    def _build_hop(self, receiver: int, owner: int) -> Hop:
        slices, strided = self._local_work(receiver, owner)
        if receiver == owner:
            # A rank's own rows stay in place, unpacked.
            rows, queries = RowRanges.whole(self.key_layout.num_ring(owner)), (0, self.layout.num_ring(owner))
            return Hop(owner, rows, queries, entries(slices, strided))
        return other_hop(owner, slices, strided)

    def _build_gathered(self, receiver: int) -> tuple[Work, ...]:
        slices, strided = [NO_SLICES], []
        for owner in range(self.layout.ring_degree):
            if owner == receiver:
                continue
            # All ranks hold equally many rows, so an owner's gathered rows start at a multiple of that count.
            first_row = owner * self.key_layout.num_ring(owner)
            of_owner, owner_strided = self._local_work(receiver, owner)
            slices.append(shift_slices(of_owner, keys=first_row))
            strided += [part.shifted(keys=first_row) for part in owner_strided]
        return entries(np.concatenate(slices), strided)

    def _local_work(self, receiver: int, owner: int) -> tuple[ndarray, list[StridedWork]]:
        """Return the slices for the mask's bands, and the work that a stride adds."""
        if not self._may_overlap(receiver, owner):
            return NO_SLICES, []
        queries, keys = self._segments(receiver), self._segments(owner, keys=True)
        if self.key_cu_seqlens is not None:
            return prefix_slices(queries, keys, causal=False), []
        mask = Mask(self.causal, self.window, self.sink_tokens, self.stride)
        joined = self.key_layout is self.layout and not self.relative_positions
        slices = local_slices(queries, keys, mask, self._boundaries, own=receiver == owner, joined=joined)
        strided = []
        if self.stride:
            for bounds in strided_bounds(mask):
                # Between a query and the keys before it, the query is the later token.
                looks_forward = bounds.least is None
                query_classes = self._classes(receiver, early=looks_forward)
                key_classes = self._classes(owner, early=not looks_forward, keys=True)
                strided.append(build_strided_work(query_classes, key_classes, bounds))
        return slices, [part for part in strided if part is not None]

    def _may_overlap(self, receiver: int, owner: int) -> bool:
        """Return False if no receiver query sees any owner key, usual for most pairs with many documents."""
        if receiver == owner:
            return True
        # Known if either rank has already searched for its partners.
        for_receiver, for_owner = self._built.get(("partners", receiver)), self._built.get(("partners", owner))
        if for_receiver is not None and for_receiver.are_known:
            return owner in for_receiver.kv_ranks
        if for_owner is not None and for_owner.are_known:
            return receiver in for_owner.receivers
        return self._segments(receiver).may_share_document(self._segments(owner, keys=True))

    def _find_partners(self, ring_rank: int) -> Partners:
        degree, one_layout = self.layout.ring_degree, self.key_layout is self.layout
        is_cross = self.key_cu_seqlens is not None
        steps = {layout.runs[ring_rank][0].step for layout in (self.layout, self.key_layout)}
        # Skip the search if it would not pay: striped tokens form documents × ranks segments, and a stride reorders
        # rows.
        if steps != {1} or self.stride or not (one_layout or is_cross):
            all_peers = frozenset(range(degree)) - {ring_rank}
            return Partners(ring_rank, degree, all_peers, all_peers, are_known=False)
        all_keys, owner_of = self._all_segments(keys=True)
        all_queries, receiver_of = self._all_segments()
        kv_ranks: set[int] = set()
        receivers: set[int] = set()
        for bounds in mask_bounds(causal=self.causal, window=self.window, sink_tokens=self.sink_tokens):
            _, keys = overlapping_segments(self._segments(ring_rank), all_keys, bounds)
            queries, _ = overlapping_segments(all_queries, self._segments(ring_rank, keys=True), bounds)
            kv_ranks.update(owner_of[keys].tolist())
            receivers.update(receiver_of[queries].tolist())
        return Partners(ring_rank, degree, frozenset(kv_ranks) - {ring_rank}, frozenset(receivers) - {ring_rank})

    def _all_segments(self, *, keys: bool = False) -> tuple[DocumentSegments, ndarray]:
        side, layout, boundaries = self._side(keys=keys)
        return self._once(("all", side), lambda: segments_of_all(layout, boundaries))

    @cached_property
    def _boundaries(self) -> ndarray:
        return np.array(self.cu_seqlens)

    def _side(self, *, keys: bool) -> tuple[str, SequenceLayout, ndarray]:
        """Return the side's name, layout and document boundaries."""
        # Keys in the queries' layout have the same segments, so both sides share one cache entry.
        if not keys or (self.key_cu_seqlens is None and self.key_layout is self.layout):
            return "queries", self.layout, self._boundaries
        return "keys", self.key_layout, np.array(self.key_cu_seqlens or self.cu_seqlens)

    def _segments(self, ring_rank: int, *, keys: bool = False) -> DocumentSegments:
        side, layout, boundaries = self._side(keys=keys)
        return self._once((side, ring_rank), lambda: cut_segments(layout.runs[ring_rank], boundaries))

    def _classes(self, ring_rank: int, *, early: bool, keys: bool = False) -> ClassSegments:
        segments, window = self._segments(ring_rank, keys=keys), self.window
        assert window is not None
        return self._once(
            ("classes", ring_rank, early, keys),
            lambda: sort_by_class(
                segments, self._boundaries, self.stride, class_lookback(window, self.stride), early=early
            ),
        )

    def _once(self, key: Hashable, build: Callable[[], T]) -> T:
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]


def local_slices(
    queries: DocumentSegments, keys: DocumentSegments, mask: Mask, boundaries: ndarray, *, own: bool, joined: bool
) -> ndarray:
    """Return the mask's bands between two ranks' local rows, or within one rank (``own``).

    ``joined`` merges segments in a document if the result is equivalent: both ranks in one layout, no window, and
    distances not needed.
    """
    # Without a window a band is full or causal, so one slice covers all segments in a document: far fewer kernel calls.
    joined = joined and mask.window is None
    if joined and own:
        return own_slices(queries, mask.causal)
    if joined and queries.step == keys.step == 1:
        return prefix_slices(queries, keys, mask.causal)
    bounds = mask_bounds(causal=mask.causal, window=mask.window, sink_tokens=mask.sink_tokens)
    sink_ends = boundaries[:-1] + mask.sink_tokens
    return np.concatenate([band_slices(queries, keys, b, sink_ends) for b in bounds])


def strided_bounds(mask: Mask) -> tuple[Bounds, ...]:
    """Return the bounds that a stride adds to a mask's window, one per visible side."""
    assert mask.window is not None
    # Nearer tokens are in the window, and the dense slices already cover them.
    back = class_lookback(mask.window, mask.stride)
    if mask.causal:
        return (Bounds(back, None),)
    return Bounds(back, None), Bounds(None, -back)


def other_hop(owner: int, slices: ndarray, strided: Sequence[StridedWork]) -> Hop:
    """Convert local work with a remote rank's keys to a hop."""
    rows = rows_seen(slices, strided)
    if not rows:
        return Hop(owner, rows, (0, 0), ())
    # Shift to kernel indices: queries start at the first row with work, keys count packed rows.
    first, stop = _query_hull(slices, strided)
    slices = shift_slices(slices, -first, rows.packing_shifts(slices[:, K_START]))
    strided = [part.shifted(-first, rows.packing_shifts(part.key_rows)) for part in strided]
    return Hop(owner, rows, (first, stop), entries(slices, strided))


def rows_seen(slices: ndarray, strided: Sequence[StridedWork]) -> RowRanges:
    """Return the owner's rows that some query sees: the key rows in local work."""
    starts, ends = slices[:, K_START], slices[:, K_STOP]
    for part in strided:
        starts, ends = np.append(starts, part.key_rows), np.append(ends, part.key_rows + 1)
    return union(starts, ends)


def entries(slices: ndarray, strided: Sequence[StridedWork]) -> tuple[Work, ...]:
    """Return one entry for the bands over all rows, then the entries that gather rows."""
    work = [Work(EVERY_ROW, EVERY_ROW, torch.from_numpy(slices))]
    for part in strided:
        work.append(part.entry())
    return tuple(work)


def _query_hull(slices: ndarray, strided: Sequence[StridedWork]) -> tuple[int, int]:
    starts, ends = slices[:, Q_START], slices[:, Q_STOP]
    for part in strided:
        starts, ends = np.append(starts, part.query_rows), np.append(ends, part.query_rows + 1)
    return int(starts.min()), int(ends.max())
