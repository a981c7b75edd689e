"""Ring attention, point to point: each rank receives KV rows directly from their owner.

Axes: B batch, n key rows per rank, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.comm.communicator import PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.runtime.activity import enter_hop
from parallel.schedule.attention_schedule import Schedule
from parallel.transport.kv_block import KeysAndValues, KVBlock, PartialResult, merge_block_
from parallel.transport.ring_exchange import PendingGradients, RingExchange, take_rows, widened


# Ring attention (Liu et al., arXiv 2310.01889) forwards complete KV blocks from neighbour to neighbour. Here each owner
# sends directly, hop h to the rank h positions after it: a hop then carries only rows that its receiver attends to, and
# with packed documents most hops disappear. Invariant: all ranks walk the hops in ascending order, so every send meets
# its receive, and each receive is posted one hop before its rows are needed.
class PointToPoint:
    """Ring transport: at hop h rank r computes with rows from rank r − h. Owners send only rows that are seen.

    ::

        rank r      hop 0          hop 1                      hop 2
        compute     own rows       rows of r − 1              rows of r − 2
        in flight   KV of hop 1    KV of hop 2                KV of hop 3, gradients of hop 1

    In backward a hop's gradients return to their owner while the next hop computes. The owner adds them hop by hop, so
    results are bitwise reproducible.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, communication_dtype: torch.dtype | None) -> None:
        self.schedule, self.rank, self.degree = schedule, mesh.ring_rank, mesh.ring_degree
        # With many documents a rank exchanges rows with few others; the remaining hops would only cost host time.
        self.hops = schedule.partners(mesh.ring_rank).hops
        self.exchange = RingExchange(mesh, communication_dtype)

    def forward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], PartialResult]) -> PartialResult:
        own = (k_BnKD, v_BnKV)
        pending_kv = self._fetch(own, 0)
        # Local keys first: each query sees at least itself, so out and lse cover all queries from here on.
        out, lse = compute(self._own_block(own))
        for number, hop in enumerate(self.hops):
            enter_hop(hop)
            block = self._block(hop, pending_kv.wait())
            # Prefetch: the next hop's rows are in flight while this hop computes.
            pending_kv = self._fetch(own, number + 1)
            if block is not None:
                # Exact for any block split: the log-sum-exps weight two softmax results over disjoint keys.
                merge_block_(out, lse, block, compute(block))
        return out, lse

    def backward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], KeysAndValues]) -> KeysAndValues:
        own = (k_BnKD, v_BnKV)
        pending_kv, returning = self._fetch(own, 0), PendingGradients()
        own_gradients = widened(compute(self._own_block(own)))
        for number, hop in enumerate(self.hops):
            enter_hop(hop)
            block = self._block(hop, pending_kv.wait())
            pending_kv = self._fetch(own, number + 1)
            gradients = compute(block) if block is not None else None
            # The previous hop's gradients, in flight while this hop computed. Adding hop by hop fixes the summation
            # order.
            returning.add_to(own_gradients)
            # Also without local gradients: this rank may still receive gradients for its own rows.
            returning = self._return_to_owner(own, gradients, hop)
        returning.add_to(own_gradients)
        return own_gradients

    def _fetch(self, own: KeysAndValues, number: int) -> PendingTensors:
        """Start a hop's exchange: receive rows from its owner, and send local rows to its receiver."""
        if number == len(self.hops):  # past the last hop
            return PendingTensors()
        hop = self.hops[number]
        owner, receiver = self._owner(hop), self._receiver(hop)
        send_tensors = take_rows(own, self.schedule.rows_needed(receiver, self.rank))
        rows = self.schedule.hop(self.rank, owner).num_rows
        return self.exchange.keys(send_tensors, to=receiver, like=own, rows=rows, source=owner, kind=Kind.KEYS)

    def _return_to_owner(self, own: KeysAndValues, gradients: KeysAndValues | None, hop: int) -> PendingGradients:
        """Start the return: send gradients to the rows' owner, and receive those for local rows."""
        owner, receiver = self._owner(hop), self._receiver(hop)
        rows = self.schedule.rows_needed(receiver, self.rank)
        return self.exchange.gradients(gradients, to=owner, like=own, rows=rows, source=receiver, kind=Kind.GRADIENTS)

    def _owner(self, hop: int) -> int:
        """Return the ring rank that owns a hop's rows."""
        return (self.rank - hop) % self.degree

    def _receiver(self, hop: int) -> int:
        """Return the ring rank that uses this rank's rows in a hop."""
        return (self.rank + hop) % self.degree

    def _own_block(self, own: KeysAndValues) -> KVBlock:
        hop = self.schedule.hop(self.rank, self.rank)
        rows = take_rows(own, hop.rows)
        assert rows is not None, "a rank has local rows"
        return KVBlock.of_hop(hop, rows)

    def _block(self, hop: int, received: KeysAndValues) -> KVBlock | None:
        """Return a hop's block; None if no local query sees the owner's rows."""
        if not received:
            return None
        return KVBlock.of_hop(self.schedule.hop(self.rank, self._owner(hop)), received)
