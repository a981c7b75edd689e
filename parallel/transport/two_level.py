"""Two-level ring attention: rows cross to another node once, then circulate inside it.

Axes: B batch, n key rows per rank, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from parallel.comm.communicator import PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.runtime.activity import enter_hop
from parallel.schedule.attention_schedule import Schedule
from parallel.schedule.row_ranges import RowRanges
from parallel.transport.kv_block import KeysAndValues, KVBlock, PartialResult, merge_block_
from parallel.transport.ring_exchange import PendingGradients, RingExchange, add_rows_, take_rows, widened


@dataclass(frozen=True)
class NodeRing:
    """Position in the two-level ring: ring rank = node · node size + local ring rank."""

    ring_rank: int
    degree: int
    node_size: int

    @property
    def num_nodes(self) -> int:
        """Number of nodes in the ring."""
        return self.degree // self.node_size

    @property
    def node(self) -> int:
        """This rank's node index."""
        return self.ring_rank // self.node_size

    def ranks_in_node(self, node: int) -> range:
        """Return a node's ring ranks; the node index wraps around."""
        first = node % self.num_nodes * self.node_size
        return range(first, first + self.node_size)

    def owner(self, step: int, hop: int) -> int:
        """Return the ring rank that owns a hop's rows in a step."""
        return self.ranks_in_node(self.node - step)[(self.ring_rank - hop) % self.node_size]

    def neighbour(self, distance: int) -> int:
        """Return the ring rank ``distance`` positions after this one in its node."""
        return self.ranks_in_node(self.node)[(self.ring_rank + distance) % self.node_size]

    def counterpart(self, distance: int) -> int:
        """Return the rank with the same local ring rank, ``distance`` nodes ahead."""
        return self.ranks_in_node(self.node + distance)[self.ring_rank % self.node_size]

    def enter_hop(self, owner: int) -> None:
        """Mark the hop, identified by the owner of the awaited rows."""
        # Counted as in a one-level ring: a hop has the same index under every transport.
        enter_hop((self.ring_rank - owner) % self.degree)

    def busy_steps(self, schedule: Schedule) -> list[int]:
        """Return the steps, from 1, in which this rank may send or receive rows, between nodes or inside its own."""
        receivers = schedule.partners(self.ring_rank).receivers
        steps = {(receiver // self.node_size - self.node) % self.num_nodes for receiver in receivers}
        # Rows that circulate in the node are those that some rank in it needs.
        for mate in self.ranks_in_node(self.node):
            kv_ranks = schedule.partners(mate).kv_ranks
            steps |= {(self.node - owner // self.node_size) % self.num_nodes for owner in kv_ranks}
        return sorted(steps - {0})


@dataclass(frozen=True)
class HeldRows:
    """One owner's rows that a rank holds for its node during a step."""

    owner: int
    rows: RowRanges
    """The owner's rows, as ranges."""
    tensors: KeysAndValues

    def needed_by(self, receiver: int, schedule: Schedule) -> RowRanges:
        """Return the held rows that some query on a ring rank sees."""
        return schedule.rows_needed(receiver, self.owner).positions_in(self.rows)


# Links between nodes are slower than inside a node, and several ranks in a node often need the same remote row. So each
# row crosses once, to the counterpart with the same local rank, which then sends it to its node's other ranks. Both
# levels overlap with compute: the outer ring prefetches one step ahead, the inner ring one hop ahead.
class TwoLevel:
    """Transport with a ring over nodes and, in each of its steps, a ring over the node's ranks.

    In step m a rank holds rows from its counterpart (the same local ring rank) m nodes before: those that its node
    needs. In the step's hop j it computes with rows held by the rank j positions before it in its node::

        node a, local rank r   step 0: rows of node a            step 1: rows of node a − 1
                               hop 0       hop 1                 hop 0          hop 1
        compute                own rows    rows of (a, r − 1)    of (a − 1, r)  of (a − 1, r − 1)
        in flight, in node     hop 1       -                     hop 1          -
        in flight, between     rows of (a − 1, r) for step 1     rows of (a − 2, r) for step 2

    In backward a hop's gradients return to the rank that holds the rows while the next hop computes, and a step's sums
    to the owner during the next step. Additions run hop by hop and step by step, so results are bitwise reproducible.
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
                    # Local keys come first: each query sees at least itself.
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
                # Rows from this node: the sum initializes the gradients for local rows.
                own_gradients = gradients
                continue
            returning.add_to(own_gradients)  # the previous step's, in flight while this one computed
            returning = self._return_to_owner(own, gradients, step)
        returning.add_to(own_gradients)
        assert own_gradients is not None
        return own_gradients

    def _steps(self, own: KeysAndValues) -> Iterator[tuple[int, HeldRows]]:
        """Yield each step and the rows held in it, while the next step's rows are in flight."""
        crossing = self._fetch_across(own, 0)
        yield 0, HeldRows(self.rank, self.schedule.hop(self.rank, self.rank).rows, own)
        for number, step in enumerate(self.steps):
            owner = self.ring.owner(step, 0)
            self.ring.enter_hop(owner)
            received = crossing.wait()
            if not received:
                # No rank in this node needs that owner's rows. The hops still run, without rows, to match the other
                # ranks.
                k, v = own
                received = (k[:, :0], v[:, :0])
            crossing = self._fetch_across(own, number + 1)
            yield step, HeldRows(owner, self._rows_to_node(owner, self.ring.node), received)

    def _hops(self, step: int, held: HeldRows) -> Iterator[KVBlock | None]:
        """Yield a step's blocks hop by hop (None if empty), while the next hop's rows are in flight."""
        pending_kv = self._send_within_node(step, held, hop=1)
        yield self._block(held.owner, take_rows(held.tensors, held.needed_by(self.rank, self.schedule)))
        for hop in range(1, self.ring.node_size):
            self.ring.enter_hop(self.ring.owner(step, hop))
            block = self._block(self.ring.owner(step, hop), pending_kv.wait())
            pending_kv = self._send_within_node(step, held, hop + 1)
            yield block

    def _gradients_of_step(
        self, step: int, held: HeldRows, compute: Callable[[KVBlock], KeysAndValues]
    ) -> KeysAndValues | None:
        """Return the held rows' gradients from all ranks in this node, added in hop order."""
        total: KeysAndValues | None = None
        returning = PendingGradients()
        for hop, block in enumerate(self._hops(step, held)):
            gradients = None if block is None else widened(compute(block))
            if hop == 0:
                # Expand to all held rows: other ranks in the node may need rows that this one does not, and return
                # their gradients here.
                total = self._as_held_rows(held, gradients)
                continue
            returning.add_to(total)  # the previous hop's
            returning = self._return_to_holder(held, gradients, hop)
        returning.add_to(total)
        return total

    def _fetch_across(self, own: KeysAndValues, number: int) -> PendingTensors:
        """Start a step's exchange between nodes: receive rows to hold, and send local rows to the counterpart."""
        if number == len(self.steps):
            return PendingTensors()
        step = self.steps[number]
        owner, receiver = self.ring.owner(step, 0), self.ring.counterpart(step)
        send_tensors = take_rows(own, self._rows_to_node(self.rank, self.ring.node + step))
        rows = self._rows_to_node(owner, self.ring.node).num_rows
        return self.exchange.keys(
            send_tensors, to=receiver, like=own, rows=rows, source=owner, kind=Kind.KEYS_BETWEEN_NODES
        )

    def _send_within_node(self, step: int, held: HeldRows, hop: int) -> PendingTensors:
        """Start a hop's exchange inside the node: receive rows from their holder, and send held rows to a neighbour."""
        if hop == self.ring.node_size:
            return PendingTensors()
        receiver, holder = self.ring.neighbour(hop), self.ring.neighbour(-hop)
        send_tensors = take_rows(held.tensors, held.needed_by(receiver, self.schedule))
        rows = self.schedule.hop(self.rank, self.ring.owner(step, hop)).num_rows
        return self.exchange.keys(
            send_tensors, to=receiver, like=held.tensors, rows=rows, source=holder, kind=Kind.KEYS
        )

    def _return_to_holder(self, held: HeldRows, gradients: KeysAndValues | None, hop: int) -> PendingGradients:
        """Start returning a hop's gradients to the neighbour that holds the rows."""
        receiver, holder = self.ring.neighbour(hop), self.ring.neighbour(-hop)
        rows = held.needed_by(receiver, self.schedule)
        return self.exchange.gradients(
            gradients, to=holder, like=held.tensors, rows=rows, source=receiver, kind=Kind.GRADIENTS
        )

    def _return_to_owner(self, own: KeysAndValues, gradients: KeysAndValues | None, step: int) -> PendingGradients:
        """Start returning a step's gradients to the rows' owner on another node."""
        owner, receiver = self.ring.owner(step, 0), self.ring.counterpart(step)
        rows = self._rows_to_node(self.rank, self.ring.node + step)
        if gradients is not None and gradients[0].shape[1] == 0:
            gradients = None  # the owner posts no receive for empty rows
        return self.exchange.gradients(
            gradients, to=owner, like=own, rows=rows, source=receiver, kind=Kind.GRADIENTS_BETWEEN_NODES
        )

    def _block(self, owner: int, received: KeysAndValues | None) -> KVBlock | None:
        if not received:
            return None
        return KVBlock.of_hop(self.schedule.hop(self.rank, owner), received)

    def _as_held_rows(self, held: HeldRows, gradients: KeysAndValues | None) -> KeysAndValues | None:
        """Expand gradients from the rows that this rank needed to all rows that it holds."""
        rows = self.schedule.hop(self.rank, held.owner).rows
        if rows == held.rows:
            return gradients
        return _scatter_gradients(gradients, rows.positions_in(held.rows), like=held.tensors)

    def _rows_to_node(self, owner: int, node: int) -> RowRanges:
        return self.schedule.rows_to_node(owner, self.ring.ranks_in_node(node))


def _scatter_gradients(gradients: KeysAndValues | None, rows: RowRanges, *, like: KeysAndValues) -> KeysAndValues:
    """Return gradients for all rows in ``like``: those given for ``rows``, zeros elsewhere."""
    k, v = like
    total = (
        k.new_zeros(k.shape, dtype=accumulate_dtype(k.dtype)),
        v.new_zeros(v.shape, dtype=accumulate_dtype(v.dtype)),
    )
    if gradients is not None:
        add_rows_(total, gradients, rows)
    return total
