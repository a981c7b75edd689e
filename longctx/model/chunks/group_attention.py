"""Attention in chunked layers: all tokens, one head group at a time, with backward; for self and cross attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.chunks.chunk_store import ChunkStore, PutOnce, Stored
from longctx.model.chunks.head_groups import ByGroups, groups_in_turn
from longctx.model.chunks.layer_parts import ChunkBackward, leaves
from longctx.model.recompute import RecomputeCache


class Projected(NamedTuple):
    """Queries, keys and values for all tokens, or their gradients."""

    q: ByGroups
    k: ByGroups
    v: ByGroups


class Attended(NamedTuple):
    """Attention's result for all tokens."""

    out: ByGroups
    caches: list[RecomputeCache]
    """What backward needs in addition, one per head group; empty without a backward pass."""


GroupAttention = Callable[[int, Sequence[Tensor], RecomputeCache | None], Tensor]
"""Attention for one head group, from its index, its queries, keys and values, and its cache."""


# Head groups bound attention's memory (as UPipe does under Ulysses, arXiv 2602.21196). Each group runs the unchanged
# core over all tokens with fewer heads, so its ring sends one group's keys, and all groups together send what one ring
# would. Splitting attention at chunk borders would send all keys once per chunk.
def forward_by_groups(
    store: ChunkStore, projected: Projected, run_core: GroupAttention, *, needs_grad: bool, release_inputs: bool
) -> Attended:
    """Attend one head group at a time; with ``release_inputs`` release values once they are read."""
    outs: list[Stored] = []
    caches: list[RecomputeCache] = []
    for group, qkv in enumerate(groups_in_turn(projected, release_inputs=release_inputs)):
        once, cache = PutOnce(store), None
        if needs_grad:
            cache = RecomputeCache("attention", once.put, by_chunks=True)
            caches.append(cache)
        outs.append(once.put(run_core(group, qkv, cache)))
        once.clear()
    return Attended(ByGroups(outs), caches)


def backward_by_groups(
    store: ChunkStore,
    projected: Projected,
    attended: Attended,
    dout: ByGroups,
    chunk_backward: ChunkBackward,
    run_core: GroupAttention,
) -> Projected:
    """Compute the gradients for queries, keys and values."""
    groups = len(attended.caches)
    sums = [_GroupSums(store, of_kind, groups) for of_kind in projected]
    group_values = groups_in_turn([projected.q, projected.k, projected.v, dout], release_inputs=True)
    for group, (cache, values) in enumerate(zip(attended.caches, group_values, strict=True)):
        dout_BtHV = values.pop()
        # The cache holds this output too.
        attended.out.free(group, groups)
        with torch.enable_grad(), cache:
            inputs = leaves(values)
            out_BtHV = run_core(group, inputs, cache)
            # The cache returns the tensors that the core saved, so no attention is computed again.
            found = list(chunk_backward([out_BtHV], inputs, [dout_BtHV]))
        # In the next group's turn only this group's gradients are left, in the store.
        values.clear()
        del inputs, out_BtHV, dout_BtHV
        for of_kind in sums:
            of_kind.add(group, found.pop(0))
    return Projected._make(ByGroups(of_kind.stored) for of_kind in sums)


class _GroupSums:
    """Gradients for queries, keys or values, summed over groups that read one place."""

    def __init__(self, store: ChunkStore, values: ByGroups, groups: int) -> None:
        self.stored: list[Stored] = []
        self._store, self._values, self._groups = store, values, groups
        self._total: Stored | None = None

    def add(self, group: int, gradient: Tensor) -> None:
        """Add a group's gradient; groups come in order."""
        assert gradient is not None, "a core's backward must return gradients for q, k and v"
        dtype, total = gradient.dtype, gradient
        if self._total is not None:
            # This object owns the sum, so it may be written to.
            total, self._total = self._total.whole().wait().add_(gradient), None
        if self._values.is_last(group, self._groups):
            self.stored.append(self._store.put(total.to(dtype)))
        else:
            # A float32 sum would be the largest tensor next to the next group's backward, so it waits in the store.
            self._total = self._store.put(total.to(accumulate_dtype(dtype), copy=total is gradient))
