"""Ring attention in two levels: rows cross to another node once, and are handed round inside it.

Axes: B batch, n key rows of a rank, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from parallel.comm.communicator import Pending
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.runtime.spans import enter_hop
from parallel.schedule.rows import RowRanges
from parallel.schedule.schedule import Schedule
from parallel.transport.block import KeysAndValues, KVBlock, PartialResult, merge_block_
from parallel.transport.exchange import PendingGradients, RingExchange, add_rows_, take_rows, widened


@dataclass(frozen=True)
class NodeRing:
    """Position of a rank: ring rank = node · node size + local ring rank."""

    ring_rank: int
    degree: int
    node_size: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes that the ring spans."""
        return self.degree // self.node_size

    @property
    def node(self) -> int:
        """Number of this rank's node."""
        return self.ring_rank // self.node_size

    def ranks_in_node(self, node: int) -> range:
        """Return the ring ranks of a node, counted on from 0 if it is beyond the last."""
        first = node % self.num_nodes * self.node_size
        return range(first, first + self.node_size)

    def owner(self, step: int, hop: int) -> int:
        """Return the ring rank whose rows this rank meets in a hop of a step."""
        return self.ranks_in_node(self.node - step)[(self.ring_rank - hop) % self.node_size]

    def neighbour(self, distance: int) -> int:
        """Return the ring rank so far after this one in its node."""
        return self.ranks_in_node(self.node)[(self.ring_rank + distance) % self.node_size]

    def counterpart(self, distance: int) -> int:
        """Return the ring rank of the same local ring rank, so many nodes on."""
        return self.ranks_in_node(self.node + distance)[self.ring_rank % self.node_size]

    def enter_hop(self, owner: int) -> None:
        """Mark the hop of the owner whose rows are waited for and computed with."""
        # Counted as in a ring of one level: then a hop has one name, whatever the transport.
        enter_hop((self.ring_rank - owner) % self.degree)

    def busy_steps(self, schedule: Schedule) -> list[int]:
        """Return the steps, from 1, in which this rank may send or receive a row, between nodes or inside its own."""
        receivers = schedule.partners(self.ring_rank).receivers
        steps = {(receiver // self.node_size - self.node) % self.num_nodes for receiver in receivers}
        # The rows handed round in the node are those that some rank in it needs.
        for mate in self.ranks_in_node(self.node):
            owners = schedule.partners(mate).owners
            steps |= {(self.node - owner // self.node_size) % self.num_nodes for owner in owners}
        return sorted(steps - {0})


@dataclass(frozen=True)
class HeldRows:
    """Rows of one owner that a rank holds in a step, to hand them round in its node."""

    owner: int
    rows: RowRanges
    """Which of the owner's rows."""
    tensors: KeysAndValues

    def needed_by(self, receiver: int, schedule: Schedule) -> RowRanges:
        """Return the held rows that some query of a ring rank sees."""
        return schedule.rows_needed(receiver, self.owner).located_in(self.rows)


class TwoLevel:
    """Transport by a ring over nodes, and in each of its steps a ring over the ranks of a node.

    In step m a rank holds rows of its counterpart (the same local ring rank) m nodes before, those that its node needs;
    in hop j of the step it computes with rows that the rank j before it in its node holds::

        node a, local rank r   step 0: rows of node a            step 1: rows of node a − 1
                               hop 0       hop 1                 hop 0          hop 1
        compute                own rows    rows of (a, r − 1)    of (a − 1, r)  of (a − 1, r − 1)
        in flight, in node     hop 1       -                     hop 1          -
        in flight, between     rows of (a − 1, r) for step 1     rows of (a − 2, r) for step 2

    In backward the gradients of a hop return to the rank that holds the rows while the next hop is computed, and the
    sums of a step to the owner while the next step is. Additions are hop by hop and step by step: equal bits every run.
    """

    def __init__(self, schedule: Schedule, mesh: Mesh, node_size: int, communication_dtype: torch.dtype | None) -> None:
        self.schedule, self.rank = schedule, mesh.ring_rank
        self.ring = NodeRing(mesh.ring_rank, mesh.ring_degree, node_size)
        self.exchange = RingExchange(mesh, communication_dtype)
        self.steps = self.ring.busy_steps(schedule)

    def forward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], PartialResult]) -> PartialResult:
        result: PartialResult | None = None
        for step, held in self._steps((k_BnKD, v_BnKV)):
            for block in self._hops(step, held):
                if block is None:
                    continue
                part = compute(block)
                if result is None:
                    # The rank's own keys come first: every query sees at least itself.
                    result = part
                else:
                    out, lse = result
                    merge_block_(out, lse, block, part)
        assert result is not None
        return result

    def backward(self, k_BnKD: Tensor, v_BnKV: Tensor, compute: Callable[[KVBlock], KeysAndValues]) -> KeysAndValues:
        own = (k_BnKD, v_BnKV)
        own_gradients: KeysAndValues | None = None
        returning = PendingGradients()
        for step, held in self._steps(own):
            gradients = self._gradients_of_step(step, held, compute)
            if step == 0:
                # Rows of this node: the sum is the start of the gradients of this rank's own rows.
                own_gradients = gradients
                continue
            returning.add_to(own_gradients)  # of the step before, which crossed while this one computed
            returning = self._return_to_owner(own, gradients, step)
        returning.add_to(own_gradients)
        assert own_gradients is not None
        return own_gradients

    def _steps(self, own: KeysAndValues) -> Iterator[tuple[int, HeldRows]]:
        """Yield each step with the rows that this rank holds in it; the next step's cross over meanwhile."""
        crossing = self._fetch_across(own, 0)
        yield 0, HeldRows(self.rank, self.schedule.hop(self.rank, self.rank).rows, own)
        for number, step in enumerate(self.steps):
            owner = self.ring.owner(step, 0)
            self.ring.enter_hop(owner)
            arrived = crossing.wait()
            if not arrived:
                # No rank in the node needs a row of that owner; hops go on without rows, as on the other ranks.
                k, v = own
                arrived = (k[:, :0], v[:, :0])
            crossing = self._fetch_across(own, number + 1)
            yield step, HeldRows(owner, self._rows_to_node(owner, self.ring.node), arrived)

    def _hops(self, step: int, held: HeldRows) -> Iterator[KVBlock | None]:
        """Yield the block of each hop of a step, None for an empty one; the next hop's rows arrive meanwhile."""
        arriving = self._hand_round(step, held, hop=1)
        yield self._block(held.owner, take_rows(held.tensors, held.needed_by(self.rank, self.schedule)))
        for hop in range(1, self.ring.node_size):
            self.ring.enter_hop(self.ring.owner(step, hop))
            block = self._block(self.ring.owner(step, hop), arriving.wait())
            arriving = self._hand_round(step, held, hop + 1)
            yield block

    def _gradients_of_step(
        self, step: int, held: HeldRows, compute: Callable[[KVBlock], KeysAndValues]
    ) -> KeysAndValues | None:
        """Return the gradients of the held rows from all ranks of this node, added in the order of the hops."""
        total: KeysAndValues | None = None
        returning = PendingGradients()
        for hop, block in enumerate(self._hops(step, held)):
            gradients = None if block is None else widened(compute(block))
            if hop == 0:
                # Held for the node: neighbours may need rows that this rank does not, and their gradients come here.
                total = self._as_held_rows(held, gradients)
                continue
            returning.add_to(total)  # of the hop before
            returning = self._return_to_holder(held, gradients, hop)
        returning.add_to(total)
        return total

    def _fetch_across(self, own: KeysAndValues, number: int) -> Pending:
        """Start a step's exchange between nodes: receive rows to hold, and send this rank's own to its counterpart."""
        if number == len(self.steps):
            return Pending()
        step = self.steps[number]
        owner, receiver = self.ring.owner(step, 0), self.ring.counterpart(step)
        outgoing = take_rows(own, self._rows_to_node(self.rank, self.ring.node + step))
        rows = self._rows_to_node(owner, self.ring.node).num_rows
        return self.exchange.keys(
            outgoing, to=receiver, like=own, rows=rows, source=owner, kind=Kind.KEYS_BETWEEN_NODES
        )

    def _hand_round(self, step: int, held: HeldRows, hop: int) -> Pending:
        """Start a hop's exchange inside the node: receive rows from their holder, send held rows to another rank."""
        if hop == self.ring.node_size:
            return Pending()
        receiver, holder = self.ring.neighbour(hop), self.ring.neighbour(-hop)
        outgoing = take_rows(held.tensors, held.needed_by(receiver, self.schedule))
        rows = self.schedule.hop(self.rank, self.ring.owner(step, hop)).num_rows
        return self.exchange.keys(outgoing, to=receiver, like=held.tensors, rows=rows, source=holder, kind=Kind.KEYS)

    def _return_to_holder(self, held: HeldRows, gradients: KeysAndValues | None, hop: int) -> PendingGradients:
        """Start the way back of a hop's gradients to the neighbour that holds the rows."""
        receiver, holder = self.ring.neighbour(hop), self.ring.neighbour(-hop)
        rows = held.needed_by(receiver, self.schedule)
        return self.exchange.gradients(
            gradients, to=holder, like=held.tensors, rows=rows, source=receiver, kind=Kind.GRADIENTS
        )

    def _return_to_owner(self, own: KeysAndValues, gradients: KeysAndValues | None, step: int) -> PendingGradients:
        """Start the way back of a step's gradients to the rows' owner in another node."""
        owner, receiver = self.ring.owner(step, 0), self.ring.counterpart(step)
        rows = self._rows_to_node(self.rank, self.ring.node + step)
        if gradients is not None and gradients[0].shape[1] == 0:
            gradients = None  # the owner expects no message for no rows
        return self.exchange.gradients(
            gradients, to=owner, like=own, rows=rows, source=receiver, kind=Kind.GRADIENTS_BETWEEN_NODES
        )

    def _block(self, owner: int, arrived: KeysAndValues | None) -> KVBlock | None:
        if not arrived:
            return None
        return KVBlock.of_hop(self.schedule.hop(self.rank, owner), arrived)

    def _as_held_rows(self, held: HeldRows, gradients: KeysAndValues | None) -> KeysAndValues | None:
        """Return the gradients of the rows that this rank needed as gradients of all rows that it holds."""
        rows = self.schedule.hop(self.rank, held.owner).rows
        if rows == held.rows:
            return gradients
        return _spread(gradients, rows.located_in(held.rows), like=held.tensors)

    def _rows_to_node(self, owner: int, node: int) -> RowRanges:
        """Return the owner's rows that some rank in a node needs."""
        return self.schedule.rows_to_node(owner, self.ring.ranks_in_node(node))


def _spread(gradients: KeysAndValues | None, rows: RowRanges, *, like: KeysAndValues) -> KeysAndValues:
    """Return the gradients of some ``rows`` as gradients of all rows of ``like``, with zeros for the others."""
    k, v = like
    total = (
        k.new_zeros(k.shape, dtype=accumulate_dtype(k.dtype)),
        v.new_zeros(v.shape, dtype=accumulate_dtype(v.dtype)),
    )
    if gradients is not None:
        add_rows_(total, gradients, rows)
    return total
