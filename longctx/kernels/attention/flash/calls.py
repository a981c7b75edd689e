"""Translate a slice table into few varlen flash kernel calls. Pure: handles shapes and windows, calls no kernel.

A varlen call takes packed query rows and packed key rows, both cut into the same number of sequences, and one window
for all: query row i in a sequence with sq rows sees key j among sk keys if ``-right <= i + sk - sq - j <= left``, that
is, counted from the *last* row (bottom-right). −1 leaves a side open; a bound cannot be negative. Two sequences in a
call share neither query nor key rows, so within a call forward needs no merge and backward no addition.

``groups.py`` brings slices into that form.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from longctx.kernels.attention.flash.slice_groups import UNBOUNDED, Group, group_slices
from longctx.kernels.attention.slices import K_START, K_STOP, OFFSET, Q_START, Q_STOP, STEP, once_per_table

__all__ = ["UNBOUNDED", "Rows", "VarlenCall", "calls_of", "slices_to_calls"]

Rows = slice | Tensor
"""Rows of a tensor: a slice if contiguous, else int64 indices."""


@dataclass(frozen=True, eq=False, kw_only=True)
class VarlenCall:
    """One call: packed rows, sequence bounds and window. Built on the CPU, for one batch row."""

    queries: Rows
    keys: Rows
    num_queries: int
    num_keys: int
    cu_seqlens_q: Tensor
    """Int32 sequence bounds in the packed query rows, [sequences + 1]."""
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int
    left: int
    right: int
    is_first: bool
    """Whether no previous call touches any of its query rows."""
    steps: Tensor
    """Token distances in a sequence are ``step·(i − j) + offset``, with i and j counted from its first rows; int64."""
    offsets: Tensor

    def on_device(self, B: int, device: torch.device) -> VarlenCall:
        """Repeat the call for B batch rows with the same sequences, and copy its tensors to the device."""

        def copied(x: Tensor) -> Tensor:
            return x.to(device, non_blocking=True)  # do not block on preceding kernels

        def bounds(cu_seqlens: Tensor) -> Tensor:
            """Return the sequence bounds for all batch rows, one row after another."""
            first = torch.arange(B, dtype=cu_seqlens.dtype)[:, None] * cu_seqlens[-1]
            return copied(torch.cat((cu_seqlens[:1], (cu_seqlens[1:] + first).flatten())))

        def rows(x: Rows) -> Rows:
            if isinstance(x, slice):
                return x
            return copied(x)

        return replace(
            self,
            queries=rows(self.queries),
            keys=rows(self.keys),
            num_queries=B * self.num_queries,
            num_keys=B * self.num_keys,
            cu_seqlens_q=bounds(self.cu_seqlens_q),
            cu_seqlens_k=bounds(self.cu_seqlens_k),
            steps=copied(self.steps.repeat(B)),
            offsets=copied(self.offsets.repeat(B)),
        )


@once_per_table
def slices_to_calls(slices: Tensor, *, relative_positions: bool = False) -> tuple[VarlenCall, ...]:
    """Translate a table into calls that together compute every slice exactly once, most query rows first.

    With ``relative_positions`` each sequence has one step and one offset, so slices are neither joined nor cut.
    """
    groups = group_slices(slices, relative_positions=relative_positions)
    # Largest call first: it usually covers all rows, and then no merge is needed.
    return calls_of(sorted(groups, key=lambda group: -int((group.work[:, Q_STOP] - group.work[:, Q_START]).sum())))


def calls_of(groups: Iterable[Group]) -> tuple[VarlenCall, ...]:
    """Build one call per group, in order."""
    groups, calls = list(groups), []
    touched = np.zeros(max((int(group.work[:, Q_STOP].max()) for group in groups), default=0), dtype=bool)
    for group in groups:
        queries = _rows(group.work[:, Q_START], group.work[:, Q_STOP])
        index = queries
        if isinstance(index, Tensor):
            index = index.numpy()
        calls.append(_call(group, queries, is_first=not touched[index].any()))
        touched[index] = True
    return tuple(calls)


def _call(group: Group, queries: Rows, *, is_first: bool) -> VarlenCall:
    """Build a group's call; each slice becomes a sequence."""
    work = group.work
    q_lengths = work[:, Q_STOP] - work[:, Q_START]
    k_lengths = work[:, K_STOP] - work[:, K_START]
    # a slice counts i and j from the tensors' first rows, a sequence from its own
    offsets = work[:, OFFSET] + work[:, STEP] * (work[:, Q_START] - work[:, K_START])
    return VarlenCall(
        queries=queries,
        keys=_rows(work[:, K_START], work[:, K_STOP]),
        num_queries=int(q_lengths.sum()),
        num_keys=int(k_lengths.sum()),
        cu_seqlens_q=_cumulative(q_lengths),
        cu_seqlens_k=_cumulative(k_lengths),
        max_seqlen_q=int(q_lengths.max()),
        max_seqlen_k=int(k_lengths.max()),
        left=group.left,
        right=group.right,
        is_first=is_first,
        steps=torch.from_numpy(work[:, STEP].copy()),
        offsets=torch.from_numpy(offsets),
    )


def _cumulative(lengths: ndarray) -> Tensor:
    return torch.from_numpy(np.concatenate(([0], np.cumsum(lengths))).astype(np.int32))


def _rows(starts: ndarray, ends: ndarray) -> Rows:
    """Return the rows in these ranges, in order."""
    if (starts[1:] == ends[:-1]).all():
        return slice(int(starts[0]), int(ends[-1]))
    lengths = ends - starts
    before = np.cumsum(lengths) - lengths  # packed rows before each range
    return torch.from_numpy(np.repeat(starts - before, lengths) + np.arange(lengths.sum()))
