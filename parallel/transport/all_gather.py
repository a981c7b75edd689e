"""All keys and values of a ring in one all-gather.

Axes: B batch, n key rows of a rank, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.mesh import Mesh, others_in_ring
from parallel.runtime.communicate import named_collective
from parallel.runtime.messages.kinds import Kind
from parallel.runtime.messages.ledger import Arrival
from parallel.schedule.schedule import Schedule
from parallel.transport.block import KeysAndValues, KVBlock, PartialResult, merge_block_


class AllGather:
    """Every rank gathers the keys and values of all ranks while it computes with its own.

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
        # Gathered once more, not saved: keys and values of all ranks would live through the whole forward pass.
        gathering = self._gather(own)
        own_gradients = compute(self._own_block(own))
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
        """Start gathering; None in a ring of one."""
        if self.mesh.ring_degree == 1:
            return None
        k, v = own
        keys, values, arrival = self._gather_one(k), self._gather_one(v), None
        if self.mesh.ledger is not None:
            outgoing = (keys.outgoing, values.outgoing)
            arrival = self.mesh.ledger.post_same(Kind.GATHERED_KEYS, outgoing, others_in_ring(self.mesh))
        return _Gathering(keys, values, f"rank {self.mesh.rank} {_DESCRIBED}", self.mesh.ring_rank, arrival)

    def _gather_one(self, x: Tensor) -> _Gathered:
        x = x.contiguous()
        buffer = x.new_empty(self.mesh.ring_degree, *x.shape)
        # The collective lays the ranks end to end along the first axis.
        end_to_end = buffer.flatten(0, 1)
        work = named_collective(
            lambda: dist.all_gather_into_tensor(end_to_end, x, group=self.mesh.ring_group, async_op=True),
            f"rank {self.mesh.rank} {_DESCRIBED}",
        )
        return _Gathered(buffer, x, work)

    def _return_to_owners(self, total_BnKD: Tensor, gradient_BsKD: Tensor) -> None:
        """Send the gradients of every rank's rows to it, and add those of this rank's rows to ``total``, in place."""
        degree, num_own = self.mesh.ring_degree, total_BnKD.shape[1]
        by_owner = gradient_BsKD.unflatten(1, (degree, num_own)).transpose(0, 1)
        outgoing = by_owner.to(self.communication_dtype or gradient_BsKD.dtype).contiguous()
        received = torch.empty_like(outgoing)
        named_collective(
            lambda: dist.all_to_all_single(received, outgoing, group=self.mesh.ring_group),
            f"rank {self.mesh.rank} returning gradients of gathered keys and values",
        )
        if self.mesh.ledger is not None:
            by_rank = {self.mesh.ring_peer(n): [part] for n, part in enumerate(outgoing) if n != self.mesh.ring_rank}
            arrival = self.mesh.ledger.post(Kind.GATHERED_GRADIENTS, by_rank, list(by_rank))
            arrival.note([[part] for n, part in enumerate(received) if n != self.mesh.ring_rank])
        # The order of the ring, from the next rank on. Sums depend neither on the transport nor on who is late.
        for distance in range(1, degree):
            total_BnKD += received[(self.mesh.ring_rank + distance) % degree]


_DESCRIBED = "gathering keys and values"


@dataclass(frozen=True)
class _Gathered:
    """One tensor of every rank under way."""

    buffer: Tensor
    """[ring, B, n, …]."""
    outgoing: Tensor
    """What leaves stays alive until it is through."""
    work: dist.Work

    def in_order(self) -> Tensor:
        """[B, ring · n, …], rank after rank; no copy for one sequence."""
        if self.buffer.shape[1] == 1:
            return self.buffer[:, 0].flatten(0, 1).unsqueeze(0)
        return self.buffer.transpose(0, 1).flatten(1, 2)


@dataclass(frozen=True)
class _Gathering:
    """Keys and values under way."""

    keys: _Gathered
    values: _Gathered
    described: str
    own: int
    """This rank's number among those gathered."""
    arrival: Arrival | None
    """Where to note what has arrived; None where nobody compares it."""

    def wait(self) -> KeysAndValues:
        """Return the keys and values of all ranks. ClusterError when a rank is gone or too late."""
        # Keys first: they are put in order while the values are still under way.
        named_collective(self.keys.work.wait, self.described)
        keys = self.keys.in_order()
        named_collective(self.values.work.wait, self.described)
        if self.arrival is not None:
            pairs = zip(self.keys.buffer, self.values.buffer, strict=True)
            self.arrival.note([pair for number, pair in enumerate(pairs) if number != self.own])
        return keys, self.values.in_order()
