"""What one rank computes with the keys of another, and which rows travel for it. Pure.

*In place* means that rows of both ranks are counted as the ranks hold them. A hop counts key rows as they arrive,
packed together, and query rows from the first that has work.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
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
from parallel.schedule.bands import NO_SLICES, band_slices, mask_bounds, own_slices, prefix_slices, shift_slices
from parallel.schedule.rows import RowRanges, union
from parallel.schedule.segments import Segments, cut_segments
from parallel.schedule.strided import ClassSegments, StridedWork, sort_by_class, strided_work

T = TypeVar("T")


class Mask(NamedTuple):
    """Which keys of its document a query sees; see ``Schedule.build``."""

    causal: bool
    window: int | None
    sink_tokens: int
    stride: int


@dataclass(frozen=True)
class Hop:
    """One ring rank's work with one owner's keys."""

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
        """Rows that travel."""
        return self.rows.num_rows


@dataclass(frozen=True)
class RingWork:
    """The work between every two ring ranks, built when it is first asked for and kept."""

    layout: SequenceLayout
    key_layout: SequenceLayout
    cu_seqlens: tuple[int, ...]
    mask: Mask
    distances: bool
    """Whether every slice tells its tokens' distance; without, pieces of a document are taken together."""
    _built: dict = field(default_factory=dict, compare=False, repr=False)

    def hop(self, receiver: int, owner: int) -> Hop:
        """The work of ring rank ``receiver`` with the keys of ring rank ``owner``."""
        return self._once(("hop", receiver, owner), lambda: self._build_hop(receiver, owner))

    def rows_needed(self, receiver: int, owner: int) -> RowRanges:
        """The owner's local rows that some query of the receiver sees: the rows of their ``hop``, without the work."""
        if receiver == owner or ("hop", receiver, owner) in self._built:
            return self.hop(receiver, owner).rows
        return self._once(("rows", receiver, owner), lambda: rows_seen(*self._in_place(receiver, owner)))

    def rows_to_node(self, owner: int, receivers: Sequence[int]) -> RowRanges:
        """The owner's rows that at least one of these ring ranks needs: what crosses to their node, once."""
        return self._once(
            ("to node", owner, *receivers), lambda: RowRanges.union([self.rows_needed(x, owner) for x in receivers])
        )

    def gathered(self, receiver: int) -> tuple[Work, ...]:
        """The work with the keys of all other ring ranks, where those of all ring ranks lie side by side."""
        return self._once(("gathered", receiver), lambda: self._build_gathered(receiver))

    def _build_hop(self, receiver: int, owner: int) -> Hop:
        slices, strided = self._in_place(receiver, owner)
        if receiver == owner:
            return own_hop(owner, self.layout.num_ring(owner), self.key_layout.num_ring(owner), slices, strided)
        return other_hop(owner, slices, strided)

    def _build_gathered(self, receiver: int) -> tuple[Work, ...]:
        parts = []
        for owner in range(self.layout.ring_degree):
            if owner != receiver:
                first_row = owner * self.key_layout.num_ring(owner)
                parts.append((first_row, *self._in_place(receiver, owner)))
        return gathered_work(parts)

    def _in_place(self, receiver: int, owner: int) -> tuple[ndarray, StridedWork | None]:
        """The slices of the mask's bands, and what a stride adds to them."""
        queries, keys = self._segments(receiver), self._segments(owner, keys=True)
        if not queries.may_meet(keys):
            return NO_SLICES, None
        one_layout = self.key_layout is self.layout
        slices = slices_in_place(
            queries,
            keys,
            self.mask,
            self._boundaries,
            own=receiver == owner,
            joined=one_layout and not self.distances,
        )
        if not self.mask.stride:
            return slices, None
        return slices, strided_work(self._classes(receiver), self._classes(owner, keys=True), self._reach)

    @cached_property
    def _boundaries(self) -> ndarray:
        return np.array(self.cu_seqlens)

    @property
    def _reach(self) -> int:
        assert self.mask.window is not None
        return reach(self.mask.window, self.mask.stride)

    def _segments(self, ring_rank: int, *, keys: bool = False) -> Segments:
        layout = self.key_layout if keys else self.layout
        side = "keys" if keys and layout is not self.layout else "queries"
        return self._once((side, ring_rank), lambda: cut_segments(layout.runs[ring_rank], self._boundaries))

    def _classes(self, ring_rank: int, *, keys: bool = False) -> ClassSegments:
        segments = self._segments(ring_rank, keys=keys)
        return self._once(
            ("classes", ring_rank, keys),
            lambda: sort_by_class(segments, self._boundaries, self.mask.stride, self._reach, keys=keys),
        )

    def _once(self, key: Hashable, build: Callable[[], T]) -> T:
        if key not in self._built:
            self._built[key] = build()
        return self._built[key]


def slices_in_place(
    queries: Segments, keys: Segments, mask: Mask, boundaries: ndarray, *, own: bool, joined: bool
) -> ndarray:
    """The bands of a mask between two ranks, or within one (``own``), in place.

    ``joined`` takes pieces of a document together where that changes nothing: both ranks in one layout, no window, and
    nobody asks for distances.
    """
    joined = joined and mask.window is None
    if joined and own:
        return own_slices(queries, mask.causal)
    if joined and queries.step == keys.step == 1:
        return prefix_slices(queries, keys, mask.causal)
    bounds = mask_bounds(causal=mask.causal, window=mask.window, sink_tokens=mask.sink_tokens)
    sink_ends = boundaries[:-1] + mask.sink_tokens
    return np.concatenate([band_slices(queries, keys, b, sink_ends) for b in bounds])


def own_hop(ring_rank: int, num_queries: int, num_keys: int, slices: ndarray, strided: StridedWork | None) -> Hop:
    """A rank's work with its own keys, which stay where they are."""
    return Hop(ring_rank, RowRanges.whole(num_keys), (0, num_queries), _entries(slices, strided))


def other_hop(owner: int, slices: ndarray, strided: StridedWork | None) -> Hop:
    """A rank's work with another's keys, given in place."""
    rows = rows_seen(slices, strided)
    if not rows:
        return Hop(owner, rows, (0, 0), ())
    first, stop = _query_hull(slices, strided)
    slices = shift_slices(slices, -first, rows.packing_shifts(slices[:, K_START]))
    if strided is not None:
        strided = strided.shifted(-first, rows.packing_shifts(strided.key_rows))
    return Hop(owner, rows, (first, stop), _entries(slices, strided))


def gathered_work(parts: Iterable[tuple[int, ndarray, StridedWork | None]]) -> tuple[Work, ...]:
    """A rank's work with the keys of several owners side by side; of each its first key row, and its work in place."""
    slices, strided = [NO_SLICES], []
    for first_row, owner_slices, owner_strided in parts:
        slices.append(shift_slices(owner_slices, keys=first_row))
        if owner_strided is not None:
            strided.append(owner_strided.shifted(keys=first_row))
    return _entries(np.concatenate(slices), *strided)


def rows_seen(slices: ndarray, strided: StridedWork | None) -> RowRanges:
    """The owner's rows that some query sees: the key rows of work in place."""
    starts, stops = slices[:, K_START], slices[:, K_STOP]
    if strided is not None:
        starts, stops = np.append(starts, strided.key_rows), np.append(stops, strided.key_rows + 1)
    return union(starts, stops)


def _entries(slices: ndarray, *strided: StridedWork | None) -> tuple[Work, ...]:
    """The bands' entry for all rows, then those that gather."""
    bands = Work(EVERY_ROW, EVERY_ROW, torch.from_numpy(slices))
    return (bands, *(part.entry() for part in strided if part is not None))


def _query_hull(slices: ndarray, strided: StridedWork | None) -> tuple[int, int]:
    starts, stops = slices[:, Q_START], slices[:, Q_STOP]
    if strided is not None:
        starts, stops = np.append(starts, strided.query_rows), np.append(stops, strided.query_rows + 1)
    return int(starts.min()), int(stops.max())
