"""Transport of all keys and values of a ring in one all-gather.

Axes: B batch, n key rows of a rank, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.comm.communicator import Pending
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.schedule.schedule import Schedule
from parallel.transport.block import KeysAndValues, KVBlock, PartialResult, merge_block_
from parallel.transport.exchange import widened


class AllGather:
    """Transport in which every rank gathers the keys and values of all ranks while it computes with its own.

    ::

        compute     own rows             rows of all other ranks, as one block
        in flight   gather of all rows   -

    One collective and two blocks instead of many hops, for memory of degree × a rank's keys and values (and twice their
    float32 gradients in backward). Gradients return to their owners in one all-to-all and are added in the order of the
    ring.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, communication_dtype: torch.dtype | None) -> None:
        self.schedule, self.mesh, self.communication_dtype = schedule, mesh, communication_dtype

    def forward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], PartialResult]) -> PartialResult:
        own = (k_BnKD, v_BnKV)
        # In flight while this rank computes with its own rows.
        gathering = self._gather(own)
        out, lse = compute(self._own_block(own))
        if gathering is not None:
            # Own rows first, then all others: the same order of additions on every run.
            block = self._others_block(gathering.wait())
            merge_block_(out, lse, block, compute(block))
        return out, lse

    def backward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], KeysAndValues]) -> KeysAndValues:
        own = (k_BnKD, v_BnKV)
        # Gathered once more, not saved: keys and values of all ranks would live through the full forward pass.
        gathering = self._gather(own)
        own_gradients = widened(compute(self._own_block(own)))
        if gathering is not None:
            gradients = compute(self._others_block(gathering.wait()))
            for total, gradient in zip(own_gradients, gradients, strict=True):
                self._return_to_owners(total, gradient)
        return own_gradients

    def _own_block(self, own: KeysAndValues) -> KVBlock:
        return KVBlock.of_hop(self.schedule.hop(self.mesh.ring_rank, self.mesh.ring_rank), own)

    def _others_block(self, gathered: KeysAndValues) -> KVBlock:
        keys, values = gathered
        queries = slice(0, self.schedule.layout.num_ring(self.mesh.ring_rank))
        return KVBlock(keys, values, queries, self.schedule.gathered_work(self.mesh.ring_rank))

    def _gather(self, own: KeysAndValues) -> _Gathering | None:
        """Start to gather; return None in a ring of one."""
        if self.mesh.ring_degree == 1:
            return None
        group = self.mesh.ring_group
        assert group is not None
        doing = "gathering keys and values"
        return _Gathering(*self.mesh.comm.start_all_gather(*own, group=group, doing=doing, kind=Kind.GATHERED_KEYS))

    def _return_to_owners(self, total_BnKD: Tensor, gradient_BsKD: Tensor) -> None:
        """Send each rank the gradients of its rows, and add those of this rank's rows to ``total``, in place."""
        degree, num_own = self.mesh.ring_degree, total_BnKD.shape[1]
        by_owner = gradient_BsKD.unflatten(1, (degree, num_own)).transpose(0, 1)
        outgoing = by_owner.to(self.communication_dtype or total_BnKD.dtype).contiguous()
        assert self.mesh.ring_group is not None
        received = self.mesh.comm.all_to_all(
            outgoing,
            self.mesh.ring_group,
            doing="returning gradients of gathered keys and values",
            kind=Kind.GATHERED_GRADIENTS,
        )
        # The order of the ring, from the next rank on. Sums depend neither on the transport nor on late ranks.
        for distance in range(1, degree):
            total_BnKD += received[(self.mesh.ring_rank + distance) % degree]


@dataclass(frozen=True)
class _Gathering:
    """Keys and values of all ranks, under way."""

    keys: Pending
    values: Pending

    def wait(self) -> KeysAndValues:
        """Return the keys and values of all ranks. Raise ClusterError if a rank is gone or too late."""
        # Keys first: they are put in order while the values are still under way.
        (keys,) = self.keys.wait()
        keys = _in_order(keys)
        (values,) = self.values.wait()
        return keys, _in_order(values)


def _in_order(gathered: Tensor) -> Tensor:
    """Reorder [ring, B, n, …] to [B, ring · n, …], rank after rank; no copy for one sequence."""
    if gathered.shape[1] == 1:
        return gathered[:, 0].flatten(0, 1).unsqueeze(0)
    return gathered.transpose(0, 1).flatten(1, 2)
