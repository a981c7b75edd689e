"""Attention work as a table: query ranges, key ranges and the bands between them.

A table is an int64 tensor [n, 8] on the CPU, one ``AttentionSlice`` per row, with ``OPEN`` for a missing bound.
Schedules build it, transports and operators pass it on, kernels read it. Tables are immutable, so derived results can
be cached for a table's lifetime (``once_per_table``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

OPEN = 2**62
"""Sentinel for a missing lower or upper bound."""

Q_START, Q_STOP, K_START, K_STOP, LO, HI, STEP, OFFSET = range(8)
"""Table columns."""

P = ParamSpec("P")
T = TypeVar("T")


class AttentionSlice(NamedTuple):
    """Query rows [q_start, q_stop) attend to key rows [k_start, k_stop) if ``lo <= i - j <= hi``.

    i and j are row indices into the kernel's input tensors (not offsets within the ranges); ``None`` leaves a side
    open. Causal attention within a document, with queries and keys in the same rows, is ``lo=0``; a full rectangle has
    no bounds. The two tokens are ``step·(i − j) + offset`` tokens apart in the document. Only scores that depend on
    distance (``Scores.needs_relative_positions``) read ``step`` and ``offset``.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int | None = None
    hi: int | None = None
    step: int = 1
    offset: int = 0

    def shifted(self, *, queries: int = 0, keys: int = 0) -> AttentionSlice:
        """Shift all query row indices by ``queries`` and key row indices by ``keys``; the work stays the same."""
        by = queries - keys
        moved = self._replace(
            q_start=self.q_start + queries,
            q_stop=self.q_stop + queries,
            k_start=self.k_start + keys,
            k_stop=self.k_stop + keys,
            offset=self.offset - self.step * by,  # keep the token distances
        )
        if self.lo is not None:
            moved = moved._replace(lo=self.lo + by)
        if self.hi is not None:
            moved = moved._replace(hi=self.hi + by)
        return moved

    def mirrored(self) -> AttentionSlice:
        """Return the same pairs with queries and keys swapped."""
        lo, hi = self.hi, self.lo
        if lo is not None:
            lo = -lo
        if hi is not None:
            hi = -hi
        return AttentionSlice(
            self.k_start, self.k_stop, self.q_start, self.q_stop, lo, hi, step=self.step, offset=-self.offset
        )


def slice_table(slices: Iterable[AttentionSlice]) -> Tensor:
    """Build the table for these slices. Equal slices return the same tensor, and so share cached results."""
    return _table_of(tuple(slices))


@lru_cache(maxsize=16)  # the masks for a few batches; results cached per table may hold device memory
@torch.inference_mode(False)  # training may reuse a table that generation cached
def _table_of(slices: tuple[AttentionSlice, ...]) -> Tensor:
    rows = []
    for s in slices:
        lo, hi = s.lo, s.hi
        if lo is None:
            lo = OPEN
        if hi is None:
            hi = OPEN
        rows.append((s.q_start, s.q_stop, s.k_start, s.k_stop, lo, hi, s.step, s.offset))
    return torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, 8))


def once_per_table(function: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """Decorate a function on tables to compute its result once per table and cache it until the table is freed.

    Other arguments must be hashable.
    """
    # Keyed weakly and by identity: a lookup takes 3 µs at any table length, while hashing or comparing 2000 slices
    # takes 30 times that. Equal tables built twice cache their results twice, and a freed table frees its results.
    known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @wraps(function)
    def cached(table: Tensor, *args: P.args, **kwargs: P.kwargs) -> T:
        results: dict[Any, T] | None = known.get(table)
        if results is None:
            results = known[table] = {}
        key = (args, tuple(kwargs.items()))
        if key not in results:
            results[key] = function(table, *args, **kwargs)
        return results[key]

    return cached


@once_per_table
def table_slices(table: Tensor) -> tuple[AttentionSlice, ...]:
    """Convert table rows to slices."""
    slices = []
    for q_start, q_stop, k_start, k_stop, lo, hi, step, offset in table.tolist():
        attn_slice = AttentionSlice(q_start, q_stop, k_start, k_stop, lo, hi, step, offset)
        if lo == OPEN:
            attn_slice = attn_slice._replace(lo=None)
        if hi == OPEN:
            attn_slice = attn_slice._replace(hi=None)
        slices.append(attn_slice)
    return tuple(slices)


class SliceGroup(NamedTuple):
    """Equal slices, one after the other in queries and keys: packed documents of one length, such as images.

    Only for scores that do not depend on distance: with other rows for queries than for keys, its offset changes.
    """

    first: AttentionSlice
    num_slices: int

    @property
    def queries(self) -> slice:
        """Query rows of all slices."""
        rows = self.first.q_stop - self.first.q_start
        return slice(self.first.q_start, self.first.q_start + self.num_slices * rows)

    @property
    def keys(self) -> slice:
        """Key rows of all slices."""
        rows = self.first.k_stop - self.first.k_start
        return slice(self.first.k_start, self.first.k_start + self.num_slices * rows)

    def extends_to(self, attn_slice: AttentionSlice) -> bool:
        """Return whether the group's next slice, if it had one more, would be ``attn_slice``."""
        moved = self.first.shifted(
            queries=self.queries.stop - self.first.q_start, keys=self.keys.stop - self.first.k_start
        )
        return moved._replace(offset=attn_slice.offset) == attn_slice


@once_per_table
def slice_groups(table: Tensor, max_rows: int) -> tuple[SliceGroup, ...]:
    """Join equal neighbouring slices, in order, into groups with at most ``max_rows`` query rows and keys each.

    A longer slice is a group of its own.
    """
    groups: list[SliceGroup] = []
    for attn_slice in table_slices(table):
        if groups and groups[-1].extends_to(attn_slice):
            longer = groups[-1]._replace(num_slices=groups[-1].num_slices + 1)
            taken = (longer.queries, longer.keys)
            if max(rows.stop - rows.start for rows in taken) <= max_rows:
                groups[-1] = longer
                continue
        groups.append(SliceGroup(attn_slice, 1))
    return tuple(groups)


def shift_table(table: Tensor, *, queries: int = 0, keys: int = 0) -> Tensor:
    """Return a new table with all query row indices shifted by ``queries`` and key row indices by ``keys``."""
    by = queries - keys  # the change in each i − j
    moved = table.numpy().copy()
    moved[:, Q_START:K_START] += queries
    moved[:, K_START:LO] += keys
    bounds = moved[:, LO:STEP]
    bounds[bounds != OPEN] += by
    moved[:, OFFSET] -= moved[:, STEP] * by
    return torch.from_numpy(moved)
