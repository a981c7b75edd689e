"""Ring attention, point to point: every rank receives keys and values directly from the rank that owns them.

Axes: B batch, n key rows of a rank, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.comm.communicator import Pending
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.runtime.spans import enter_hop
from parallel.schedule.schedule import Schedule
from parallel.transport.block import KeysAndValues, KVBlock, PartialResult, merge_block_
from parallel.transport.exchange import PendingGradients, RingExchange, take_rows, widened


class PointToPoint:
    """Ring: in hop h rank r computes with rows of rank r − h; none is forwarded, only rows that are seen are sent.

    ::

        rank r      hop 0          hop 1                      hop 2
        compute     own rows       rows of r − 1              rows of r − 2
        in flight   KV of hop 1    KV of hop 2                KV of hop 3, gradients of hop 1

    In backward the gradients of a hop return to their owner while the next hop is computed, and an owner adds them hop
    by hop: equal bits on every run.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, communication_dtype: torch.dtype | None) -> None:
        self.schedule, self.rank, self.degree = schedule, mesh.ring_rank, mesh.ring_degree
        # With many documents a rank meets few others: the other hops would only cost time on the host.
        self.hops = schedule.partners(mesh.ring_rank).hops
        self.exchange = RingExchange(mesh, communication_dtype)

    def forward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], PartialResult]) -> PartialResult:
        own = (k_BnKD, v_BnKV)
        arriving = self._fetch(own, 0)
        # Own keys first: every query sees at least itself, so out and lse are of all queries from here on.
        out, lse = compute(self._own_block(own))
        for number, hop in enumerate(self.hops):
            enter_hop(hop)
            block = self._block(hop, arriving.wait())
            # The next hop's rows are in flight while this hop computes.
            arriving = self._fetch(own, number + 1)
            if block is not None:
                # Exact whatever the blocks: log-sum-exps weigh the two softmax results over disjoint keys.
                merge_block_(out, lse, block, compute(block))
        return out, lse

    def backward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], KeysAndValues]) -> KeysAndValues:
        own = (k_BnKD, v_BnKV)
        arriving, returning = self._fetch(own, 0), PendingGradients()
        own_gradients = widened(compute(self._own_block(own)))
        for number, hop in enumerate(self.hops):
            enter_hop(hop)
            block = self._block(hop, arriving.wait())
            arriving = self._fetch(own, number + 1)
            gradients = compute(block) if block is not None else None
            # Of the hop before: they travelled while this one computed. Adding hop by hop fixes the order of the sum.
            returning.add_to(own_gradients)
            # A rank without gradients of its own takes part, too: it may receive those of its rows.
            returning = self._return_to_owner(own, gradients, hop)
        returning.add_to(own_gradients)
        return own_gradients

    def _fetch(self, own: KeysAndValues, number: int) -> Pending:
        """Start a hop's exchange: rows of its owner come here, this rank's rows go to the rank that needs them."""
        if number == len(self.hops):  # nothing follows the last hop
            return Pending()
        hop = self.hops[number]
        owner, receiver = self._owner(hop), self._receiver(hop)
        outgoing = take_rows(own, self.schedule.rows_needed(receiver, self.rank))
        rows = self.schedule.hop(self.rank, owner).num_rows
        return self.exchange.keys(outgoing, to=receiver, like=own, rows=rows, source=owner, kind=Kind.KEYS)

    def _return_to_owner(self, own: KeysAndValues, gradients: KeysAndValues | None, hop: int) -> PendingGradients:
        """Start the way back: gradients go to the rows' owner, those of this rank's own rows come here."""
        owner, receiver = self._owner(hop), self._receiver(hop)
        rows = self.schedule.rows_needed(receiver, self.rank)
        return self.exchange.gradients(gradients, to=owner, like=own, rows=rows, source=receiver, kind=Kind.GRADIENTS)

    def _owner(self, hop: int) -> int:
        """Return the ring rank whose rows this rank meets in a hop."""
        return (self.rank - hop) % self.degree

    def _receiver(self, hop: int) -> int:
        """Return the ring rank that meets this rank's rows in a hop."""
        return (self.rank + hop) % self.degree

    def _own_block(self, own: KeysAndValues) -> KVBlock:
        hop = self.schedule.hop(self.rank, self.rank)
        rows = take_rows(own, hop.rows)
        assert rows is not None, "a rank has rows of its own"
        return KVBlock.of_hop(hop, rows)

    def _block(self, hop: int, arrived: KeysAndValues) -> KVBlock | None:
        """Return the block of a hop; None if no query of this rank sees a row of the owner."""
        if not arrived:
            return None
        return KVBlock.of_hop(self.schedule.hop(self.rank, self._owner(hop)), arrived)
