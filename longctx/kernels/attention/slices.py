"""Attention's work as a table: which query rows meet which key rows, under which band.

A table is an int64 tensor [n, 8] on the CPU, one ``AttentionSlice`` a row, with ``OPEN`` where a band has no bound. It
is what schedules make, what transports and operators pass on, and what kernels read. Nobody writes into a table once
it is made, so what follows from one can be remembered for as long as it lives (``once_per_table``).
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
    """Query rows [q_start, q_stop) meet key rows [k_start, k_stop) where ``lo <= i - j <= hi``.

    i and j are row indices into the tensors handed to the kernel (not offsets within the ranges); ``None`` leaves a
    side open. Causal attention of a document whose queries and keys lie in the same rows is ``lo=0``; a full rectangle
    has no bounds. ``step`` and ``offset`` tell how far apart in the document the two tokens are: ``step·(i − j) +
    offset`` tokens. Only scores that depend on distance (``Scores.needs_distances``) read them.
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
        """The same work with query rows counted ``queries``, key rows ``keys`` further on."""
        by = queries - keys
        lo, hi = (None if bound is None else bound + by for bound in (self.lo, self.hi))
        return AttentionSlice(
            self.q_start + queries,
            self.q_stop + queries,
            self.k_start + keys,
            self.k_stop + keys,
            lo,
            hi,
            self.step,
            self.offset - self.step * by,
        )


def slice_table(slices: Iterable[AttentionSlice]) -> Tensor:
    """The table of these slices. Equal slices give the same tensor again, so it knows what follows from it."""
    return _table_of(tuple(slices))


@lru_cache(maxsize=16)  # the masks of a few batches; what follows from a table may take room on the device
def _table_of(slices: tuple[AttentionSlice, ...]) -> Tensor:
    rows = [(s.q_start, s.q_stop, s.k_start, s.k_stop, _bound(s.lo), _bound(s.hi), s.step, s.offset) for s in slices]
    return torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1, 8))


def _bound(value: int | None) -> int:
    return OPEN if value is None else value


def once_per_table(function: Callable[Concatenate[Tensor, P], T]) -> Callable[Concatenate[Tensor, P], T]:
    """The function of a table, which computes its result once and remembers it until the table is freed.

    A lookup takes 3 µs however long the table is; to hash or to compare a table of 2000 slices takes 30 times that.
    Other arguments must be hashable.
    """
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
    """The rows of a table, to read one by one."""
    return tuple(
        AttentionSlice(q0, q1, k0, k1, None if lo == OPEN else lo, None if hi == OPEN else hi, step, offset)
        for q0, q1, k0, k1, lo, hi, step, offset in table.tolist()
    )


def shifted(table: Tensor, *, queries: int = 0, keys: int = 0) -> Tensor:
    """The same work with query rows counted ``queries``, key rows ``keys`` further on; a new table."""
    by = queries - keys
    moved = table.numpy().copy()
    moved[:, Q_START:K_START] += queries
    moved[:, K_START:LO] += keys
    bounds = moved[:, LO:STEP]
    bounds[bounds != OPEN] += by
    moved[:, OFFSET] -= moved[:, STEP] * by
    return torch.from_numpy(moved)
