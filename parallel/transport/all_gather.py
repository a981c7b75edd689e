"""Transport that moves a ring's keys and values in one all-gather.

Axes: B batch, n key rows per rank, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from parallel.comm.communicator import PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.schedule.attention_schedule import Schedule
from parallel.transport.kv_block import KeysAndValues, KVBlock, PartialResult, merge_block_
from parallel.transport.ring_exchange import widened


class AllGather:
    """Transport that gathers all ranks' keys and values while the rank computes with its own.

    ::

        compute     own rows             rows from all other ranks, as one block
        in flight   gather of all rows   -

    One collective and two blocks replace many hops, for memory of degree × a rank's keys and values (and twice their
    float32 gradients in backward). One all-to-all returns gradients to their owners, which add them in ring order.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, communication_dtype: torch.dtype | None) -> None:
        self.schedule, self.mesh, self.communication_dtype = schedule, mesh, communication_dtype

    def forward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], PartialResult]) -> PartialResult:
        own = (k_BnKD, v_BnKV)
        # In flight while this rank computes with its own rows.
        pending = self._gather(own)
        out, lse = compute(self._own_block(own))
        if pending is not None:
            # Local rows first, then all others: a fixed order of additions.
            block = self._others_block(pending.wait())
            merge_block_(out, lse, block, compute(block))
        return out, lse

    def backward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], KeysAndValues]) -> KeysAndValues:
        own = (k_BnKD, v_BnKV)
        # Gathered again instead of saved: saved activations would keep all ranks' keys and values through the full
        # forward.
        pending = self._gather(own)
        own_gradients = widened(compute(self._own_block(own)))
        if pending is not None:
            gradients = compute(self._others_block(pending.wait()))
            for total, gradient in zip(own_gradients, gradients, strict=True):
                self._reduce_gradients(total, gradient)
        return own_gradients

    def _own_block(self, own: KeysAndValues) -> KVBlock:
        return KVBlock.of_hop(self.schedule.hop(self.mesh.ring_rank, self.mesh.ring_rank), own)

    def _others_block(self, gathered: KeysAndValues) -> KVBlock:
        keys, values = gathered
        queries = slice(0, self.schedule.layout.num_ring(self.mesh.ring_rank))
        return KVBlock(keys, values, queries, self.schedule.gathered_work(self.mesh.ring_rank))

    def _gather(self, own: KeysAndValues) -> _PendingGather | None:
        """Start the gather; return None if the ring degree is 1."""
        if self.mesh.ring_degree == 1:
            return None
        group = self.mesh.ring_group
        assert group is not None
        operation = "gathering keys and values"
        return _PendingGather(
            *self.mesh.comm.start_all_gather(*own, group=group, operation=operation, kind=Kind.GATHERED_KEYS)
        )

    def _reduce_gradients(self, total_BnKD: Tensor, gradient_BsKD: Tensor) -> None:
        """Send each rank its rows' gradients, and add those for this rank's rows to ``total``, in place."""
        degree, num_own = self.mesh.ring_degree, total_BnKD.shape[1]
        by_owner = gradient_BsKD.unflatten(1, (degree, num_own)).transpose(0, 1)
        send_buffer = by_owner.to(self.communication_dtype or total_BnKD.dtype).contiguous()
        assert self.mesh.ring_group is not None
        received = self.mesh.comm.all_to_all(
            send_buffer,
            self.mesh.ring_group,
            operation="returning gathered KV gradients",
            kind=Kind.GATHERED_GRADIENTS,
        )
        # Ring order, from the next rank on, as in the other transports: sums depend neither on the transport nor on
        # timing.
        for distance in range(1, degree):
            total_BnKD += received[(self.mesh.ring_rank + distance) % degree]


@dataclass(frozen=True)
class _PendingGather:
    """Pending all-gather over keys and values."""

    keys: PendingTensors
    values: PendingTensors

    def wait(self) -> KeysAndValues:
        """Return all ranks' keys and values. Raise ClusterError if a rank died or timed out."""
        # Keys first: reordering them overlaps with the transfer of values.
        (keys,) = self.keys.wait()
        keys = _in_order(keys)
        (values,) = self.values.wait()
        return keys, _in_order(values)


def _in_order(gathered: Tensor) -> Tensor:
    """Reorder [ring, B, n, …] to [B, ring · n, …] in rank order; avoid the copy if B is 1."""
    if gathered.shape[1] == 1:
        return gathered[:, 0].flatten(0, 1).unsqueeze(0)
    return gathered.transpose(0, 1).flatten(1, 2)
