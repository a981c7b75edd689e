"""What transports share: rows taken out and added back, buffers for what arrives, exchanges under way.

An exchange sends to one peer and receives from another; either side may have nothing to do in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from parallel.mesh import Mesh
from parallel.runtime.communicate import named_collective
from parallel.runtime.messages.kinds import Kind
from parallel.runtime.messages.ledger import Arrival
from parallel.schedule.rows import RowRanges
from parallel.transport.block import KeysAndValues

TAG_KEYS, TAG_KEYS_BETWEEN_NODES, TAG_GRADIENTS, TAG_GRADIENTS_BETWEEN_NODES = 1, 3, 5, 7
"""Message tags; the second tensor of an exchange has the next number."""
_BETWEEN_NODES = (TAG_KEYS_BETWEEN_NODES, TAG_GRADIENTS_BETWEEN_NODES)
_KINDS = {
    TAG_KEYS: Kind.KEYS,
    TAG_KEYS_BETWEEN_NODES: Kind.KEYS_BETWEEN_NODES,
    TAG_GRADIENTS: Kind.GRADIENTS,
    TAG_GRADIENTS_BETWEEN_NODES: Kind.GRADIENTS_BETWEEN_NODES,
}


@dataclass
class PendingExchange:
    """Keys and values, or their gradients, under way."""

    received: KeysAndValues | None = None
    """Buffers that are being filled; None when nothing is to come."""
    sent: tuple[Tensor, ...] = ()
    """What leaves stays alive until it is through."""
    works: list[dist.Work] = field(default_factory=list)
    described: str = ""
    arrival: Arrival | None = None
    """Where to note what has arrived; None where nobody compares it, or nothing is to come."""

    def wait(self) -> KeysAndValues | None:
        """Return what arrived. ClusterError when the peer is gone or too late."""
        named_collective(lambda: [work.wait() for work in self.works], self.described)
        self.sent = ()
        if self.arrival is not None and self.received is not None:
            self.arrival.note([self.received])
        return self.received


@dataclass
class PendingGradients:
    """Gradients on their way back to the rank that holds the rows."""

    exchange: PendingExchange = field(default_factory=PendingExchange)
    rows: RowRanges | None = None
    """Where they belong among the receiver's rows."""

    def add_to(self, total: KeysAndValues | None) -> None:
        """Wait for them and add them to the gradients of the rows they belong to."""
        gradients = self.exchange.wait()
        if gradients is not None:
            assert total is not None
            assert self.rows is not None
            add_rows_(total, gradients, self.rows)


@dataclass(frozen=True)
class RingExchange:
    """Starts exchanges between the ranks of a ring, which are named by their ring ranks."""

    mesh: Mesh
    communication_dtype: torch.dtype | None
    """Of gradients under way; None: as they were accumulated."""

    def keys(
        self, outgoing: KeysAndValues | None, *, to: int, like: KeysAndValues, rows: int, source: int, tag: int
    ) -> PendingExchange:
        """Send keys and values; receive ``rows`` of them in the dtype of ``like``."""
        return self._start(outgoing, to, empty_rows(like, rows), source, tag, "keys and values")

    def gradients(
        self, outgoing: KeysAndValues | None, *, to: int, like: KeysAndValues, rows: RowRanges, source: int, tag: int
    ) -> PendingGradients:
        """Send gradients; receive those of ``rows``, the receiver's own."""
        # In the dtype of accumulation: rounding each rank's part to bfloat16 is a choice of the user's.
        dtype = self.communication_dtype or accumulate_dtype(like[0].dtype)
        buffers = empty_rows(like, rows.num_rows, dtype)
        if outgoing is not None:
            dk, dv = outgoing
            outgoing = (self._to_communicate(dk), self._to_communicate(dv))
        return PendingGradients(self._start(outgoing, to, buffers, source, tag, "gradients"), rows)

    def _to_communicate(self, gradient: Tensor) -> Tensor:
        return gradient.to(self.communication_dtype or gradient.dtype).contiguous()

    def _start(
        self,
        outgoing: KeysAndValues | None,
        to: int,
        buffers: KeysAndValues | None,
        source: int,
        tag: int,
        what: str,
    ) -> PendingExchange:
        group, receiver, sender = self.mesh.ring_group, self.mesh.ring_peer(to), self.mesh.ring_peer(source)
        # NCCL has one stream a group: in one group a node's hops would wait for the slow rows of another node.
        if tag in _BETWEEN_NODES and self.mesh.between_nodes_group is not None:
            group = self.mesh.between_nodes_group
        described = f"rank {self.mesh.rank} exchanging {what} with ranks {receiver} (to) and {sender} (from)"
        # One batch: NCCL needs sends and receives of two peers grouped, or each waits for the other's receive.
        ops = []
        for n, x in enumerate(outgoing or ()):
            ops.append(dist.P2POp(dist.isend, x, receiver, group, tag + n))
        for n, x in enumerate(buffers or ()):
            ops.append(dist.P2POp(dist.irecv, x, sender, group, tag + n))
        works: list[dist.Work] = []
        if ops:
            works = named_collective(lambda: dist.batch_isend_irecv(ops), described)
        return PendingExchange(
            buffers, outgoing or (), works, described, self._post(outgoing, to, buffers, source, tag)
        )

    def _post(
        self, outgoing: KeysAndValues | None, to: int, buffers: KeysAndValues | None, source: int, tag: int
    ) -> Arrival | None:
        """Note what has been sent, where ranks compare it; returns where to note what arrives."""
        ledger, degree, rank = self.mesh.ledger, self.mesh.ring_degree, self.mesh.ring_rank
        if ledger is None:
            return None
        # A hop is how far keys travel round the ring; gradients go the same way back.
        kind, hop = _KINDS[tag], (to - rank) % degree
        if kind in (Kind.GRADIENTS, Kind.GRADIENTS_BETWEEN_NODES):
            hop = (rank - to) % degree
        sent, sources = {}, []
        if outgoing is not None:
            sent[self.mesh.ring_peer(to)] = outgoing
        if buffers is not None:
            sources.append(self.mesh.ring_peer(source))
        # After the start: bytes travel while they are summed.
        return ledger.post(kind, sent, sources, hop=hop)


def take_rows(tensors: KeysAndValues, rows: RowRanges) -> KeysAndValues | None:
    """The given rows of both, each in one piece of memory; no copy where they lie in one already. None for no rows."""
    if not rows:
        return None
    k, v = tensors
    # One range, the usual case of long documents, is a view: the send reads it where it is.
    if len(rows) == 1:
        ((start, stop),) = rows
        return k[:, start:stop].contiguous(), v[:, start:stop].contiguous()
    index = rows.index(k.device)
    return k.index_select(1, index), v.index_select(1, index)


def empty_rows(like: KeysAndValues, rows: int, dtype: torch.dtype | None = None) -> KeysAndValues | None:
    """Buffers for so many rows; None for none."""
    if not rows:
        return None
    k, v = (x.new_empty((x.shape[0], rows, x.shape[2], x.shape[3]), dtype=dtype or x.dtype) for x in like)
    return k, v


def add_rows_(total: KeysAndValues, parts: KeysAndValues, rows: RowRanges) -> None:
    """Add packed rows to the rows that they are of, in place."""
    for whole, part in zip(total, parts, strict=True):
        if len(rows) == 1:
            ((start, stop),) = rows
            whole[:, start:stop] += part
        else:
            # Every row once, so the order of additions is that of the calls.
            whole.index_add_(1, rows.index(whole.device), part.to(whole.dtype))
