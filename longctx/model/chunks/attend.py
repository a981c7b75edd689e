"""Attention of all tokens, a group of heads at a time, and its backward: for a layer's own and for cross attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.chunks.heads import ByGroups, groups_in_turn
from longctx.model.chunks.parts import Differentiate, leaves
from longctx.model.chunks.store import ChunkStore, PutOnce, Stored
from longctx.model.recompute import RecomputeCache


class Projected(NamedTuple):
    """Queries, keys and values of all tokens, or their gradients."""

    q: ByGroups
    k: ByGroups
    v: ByGroups


class Attended(NamedTuple):
    """Result of attention for all tokens."""

    out: ByGroups
    caches: list[RecomputeCache]
    """What backward needs besides, one a group of heads; none where there is no backward."""


Attend = Callable[[int, Sequence[Tensor], RecomputeCache | None], Tensor]
"""Attention of a group of heads, from its number, its queries, keys and values."""


def attend_by_groups(store: ChunkStore, projected: Projected, attend: Attend, *, trains: bool, frees: bool) -> Attended:
    """Attend, a group of heads at a time; with ``frees`` release the values once they are read."""
    outs: list[Stored] = []
    caches: list[RecomputeCache] = []
    for group, qkv in enumerate(groups_in_turn(projected, frees=frees)):
        once, cache = PutOnce(store), None
        if trains:
            cache = RecomputeCache("attention", once.put, by_chunks=True)
            caches.append(cache)
        outs.append(once.put(attend(group, qkv, cache)))
        once.forget()
    return Attended(ByGroups(outs), caches)


def attend_backward(
    store: ChunkStore,
    projected: Projected,
    attended: Attended,
    dout: ByGroups,
    differentiate: Differentiate,
    attend: Attend,
) -> Projected:
    """Return the gradients of queries, keys and values."""
    groups = len(attended.caches)
    sums = [_GroupSums(store, of_kind, groups) for of_kind in projected]
    arriving = groups_in_turn([projected.q, projected.k, projected.v, dout], frees=True)
    for group, (cache, values) in enumerate(zip(attended.caches, arriving, strict=True)):
        dout_BtHV = values.pop()
        # The cache has it.
        attended.out.free(group, groups)
        with torch.enable_grad(), cache:
            inputs = leaves(values)
            out_BtHV = attend(group, inputs, cache)
            # The cache returns the tensors that the core saved, so this computes no attention a second time.
            found = list(differentiate([out_BtHV], inputs, [dout_BtHV]))
        # In the next group's turn only the gradients of this one are left, in the store.
        values.clear()
        del inputs, out_BtHV, dout_BtHV
        for of_kind in sums:
            of_kind.add(group, found.pop(0))
    return Projected._make(ByGroups(of_kind.stored) for of_kind in sums)


class _GroupSums:
    """Gradients of queries, keys or values: those of groups that read one place are added up."""

    def __init__(self, store: ChunkStore, values: ByGroups, groups: int) -> None:
        self.stored: list[Stored] = []
        self._store, self._values, self._groups = store, values, groups
        self._total: Stored | None = None

    def add(self, group: int, gradient: Tensor) -> None:
        """Add the gradient of a group; groups come in order."""
        assert gradient is not None, "a core's backward owes q, k and v a gradient each"
        dtype, total = gradient.dtype, gradient
        if self._total is not None:
            # The sum belongs to this object alone, so it may be written to.
            total, self._total = self._total.whole().wait().add_(gradient), None
        if self._values.is_last(group, self._groups):
            self.stored.append(self._store.put(total.to(dtype)))
        else:
            # In float32 it would be the largest tensor beside the next group's backward, so it waits in the store.
            self._total = self._store.put(total.to(accumulate_dtype(dtype), copy=total is gradient))
