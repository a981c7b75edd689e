"""Attention's work as a table: the query rows and key rows that meet, and their bands.

A table is an int64 tensor [n, 8] on the CPU, one ``AttentionSlice`` per row, with ``OPEN`` for a missing bound.
Schedules make it, transports and operators pass it on, and kernels read it. A table is never changed after it is made,
so results that follow from it can be cached for as long as it lives (``once_per_table``).
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
"""Stands for a missing bound, below or above."""

Q_START, Q_STOP, K_START, K_STOP, LO, HI, STEP, OFFSET = range(8)
"""Columns of a table."""

P = ParamSpec("P")
T = TypeVar("T")


class AttentionSlice(NamedTuple):
    """Query rows [q_start, q_stop) that meet key rows [k_start, k_stop) if ``lo <= i - j <= hi``.

    i and j are row indices into the tensors handed to the kernel (not offsets within the ranges); ``None`` leaves a
    side open. Causal attention of a document with queries and keys in the same rows is ``lo=0``; a full rectangle has
    no bounds. ``step`` and ``offset`` give the distance of the two tokens in the document: ``step·(i − j) + offset``
    tokens. Only scores that depend on distance (``Scores.needs_distances``) read them.
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
        """Return the same work with all query row indices moved by ``queries`` and key row indices by ``keys``."""
        by = queries - keys
        moved = self._replace(
            q_start=self.q_start + queries,
            q_stop=self.q_stop + queries,
            k_start=self.k_start + keys,
            k_stop=self.k_stop + keys,
            offset=self.offset - self.step * by,  # the tokens are as far apart as before
        )
        if self.lo is not None:
            moved = moved._replace(lo=self.lo + by)
        if self.hi is not None:
            moved = moved._replace(hi=self.hi + by)
        return moved

    def mirrored(self) -> AttentionSlice:
        """Return the same pairs with queries and keys exchanged."""
        lo, hi = self.hi, self.lo
        if lo is not None:
            lo = -lo
        if hi is not None:
            hi = -hi
        return AttentionSlice(
            self.k_start, self.k_stop, self.q_start, self.q_stop, lo, hi, step=self.step, offset=-self.offset
        )


def slice_table(slices: Iterable[AttentionSlice]) -> Tensor:
    """Return the table of these slices. Equal slices give the same tensor again, and so share cached results."""
    return _table_of(tuple(slices))


@lru_cache(maxsize=16)  # the masks of a few batches; results cached for a table may take memory on the device
@torch.inference_mode(False)  # training may find a table that generation cached
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
    """Decorate a function of a table to compute its result once and cache it until the table is freed.

    A lookup takes 3 µs however long the table is; hashing or comparing a table of 2000 slices takes 30 times that.
    Other arguments must be hashable.
    """
    # weak and by identity: equal tables that were made twice have results twice, and a freed table frees its results
    known: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    @wraps(function)
    def remembered(table: Tensor, *args: P.args, **kwargs: P.kwargs) -> T:
        results: dict[Any, T] | None = known.get(table)
        if results is None:
            results = known[table] = {}
        key = (args, tuple(kwargs.items()))
        if key not in results:
            results[key] = function(table, *args, **kwargs)
        return results[key]

    return remembered


@once_per_table
def table_slices(table: Tensor) -> tuple[AttentionSlice, ...]:
    """Return the rows of a table as slices."""
    slices = []
    for q_start, q_stop, k_start, k_stop, lo, hi, step, offset in table.tolist():
        attn_slice = AttentionSlice(q_start, q_stop, k_start, k_stop, lo, hi, step, offset)
        if lo == OPEN:
            attn_slice = attn_slice._replace(lo=None)
        if hi == OPEN:
            attn_slice = attn_slice._replace(hi=None)
        slices.append(attn_slice)
    return tuple(slices)


def shifted(table: Tensor, *, queries: int = 0, keys: int = 0) -> Tensor:
    """Return a new table with all query row indices moved by ``queries`` and key row indices by ``keys``."""
    by = queries - keys  # the change of every i − j
    moved = table.numpy().copy()
    moved[:, Q_START:K_START] += queries
    moved[:, K_START:LO] += keys
    bounds = moved[:, LO:STEP]
    bounds[bounds != OPEN] += by
    moved[:, OFFSET] -= moved[:, STEP] * by
    return torch.from_numpy(moved)
