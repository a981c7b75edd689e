"""``Communicator``: all communication between ranks in a training step.

Every call marks the operation that the rank waits for, so that a hang can be reported, and names it on failure. If
ranks verify their messages, each call also records a checksum per sent and received message, under an identity that
both sides derive. Senders and receivers are global ranks, as in torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from parallel.comm.collective import named_collective
from parallel.comm.messages.kinds import Kind
from parallel.comm.messages.ledger import Arrival, Ledger
from parallel.comm.process_groups import members

_MOST_TENSORS = 4
"""Maximum tensors per message between two ranks."""


@dataclass
class PendingTensors:
    """Tensors in flight between ranks."""

    received: tuple[Tensor, ...] = ()
    """Receive buffers; do not read them before ``wait`` returns."""
    sent: tuple[Tensor, ...] = ()
    """Send buffers, kept alive until the transfer completes."""
    works: Sequence[dist.Work] = ()
    operation: str = ""
    ranks: Sequence[int] = ()
    """Participating ranks, unless ``operation`` names them."""
    arrival: Arrival | None = None
    """Records received messages; None if messages are not verified, or no message is expected."""
    messages: Sequence[Sequence[Tensor]] = ()
    """Tensors per expected message, for ``arrival``."""

    def wait(self) -> tuple[Tensor, ...]:
        """Wait, and return the received tensors. Raise ClusterError if a rank died or timed out."""
        named_collective(self._wait, self.operation, self.ranks)
        self.sent = ()
        if self.arrival is not None:
            self.arrival.note(self.messages)
        return self.received

    def _wait(self) -> None:
        for work in self.works:
            work.wait()


class Communicator:
    """A training step's collectives. On failure they raise ClusterError, which names the operation."""

    def __init__(self, ledger: Ledger | None = None) -> None:
        """Record checksums in ``ledger``, if given, for every message that has a kind."""
        self.ledger = ledger

    def send_recv(
        self,
        sent: Mapping[int, Sequence[Tensor]],
        received: Mapping[int, Sequence[Tensor]],
        group: ProcessGroup,
        *,
        operation: str,
        kind: Kind | None = None,
        hop: int = -1,
    ) -> PendingTensors:
        """Start sending tensors to ranks, and receiving into buffers from ranks."""
        # One batch: NCCL requires sends and receives between two peers to be grouped, or each side blocks on the
        # other's receive.
        ops = []
        # Tags distinguish tensors between two ranks by kind and index.
        tag = _MOST_TENSORS * (kind or 0)
        for op, by_rank in ((dist.isend, sent), (dist.irecv, received)):
            for rank, tensors in by_rank.items():
                ops += [dist.P2POp(op, x, rank, group, tag + n) for n, x in enumerate(tensors)]
        if not ops:
            return PendingTensors()
        works = named_collective(lambda: dist.batch_isend_irecv(ops), operation)
        send_buffers, receive_buffers = (
            [x for tensors in by_rank.values() for x in tensors] for by_rank in (sent, received)
        )
        pending = PendingTensors(tuple(receive_buffers), tuple(send_buffers), works, operation)
        if self.ledger is not None and kind is not None:
            # After the start, so that the transfer overlaps with the checksum.
            pending.arrival = self.ledger.post(kind, sent, list(received), hop=hop)
            pending.messages = list(received.values())
        return pending

    def all_gather(
        self, x: Tensor, group: ProcessGroup, *, operation: str, kind: Kind | None = None, out: Tensor | None = None
    ) -> Tensor:
        """Gather equally shaped tensors from all ranks: [ranks, …], in group order, into ``out`` if given."""
        (pending,) = self.start_all_gather(x, group=group, operation=operation, kind=kind, out=out, is_async=False)
        return pending.wait()[0]

    def start_all_gather(
        self,
        *tensors: Tensor,
        group: ProcessGroup,
        operation: str,
        kind: Kind | None = None,
        layer: int = -1,
        out: Tensor | None = None,
        is_async: bool = True,
    ) -> tuple[PendingTensors, ...]:
        """Start gathering tensors from every rank, each equally shaped on all ranks: [ranks, …], in group order.

        Each has its own ``PendingTensors``, to be waited on in order; the ledger counts them as one message.
        """
        ranks, started = members(group), []
        tensors = tuple(x.contiguous() for x in tensors)
        for x in tensors:
            gathered = x.new_empty(len(ranks.ranks), *x.shape) if out is None else out
            # The collective concatenates ranks in a flat buffer.
            start = partial(dist.all_gather_into_tensor, gathered.view(-1), x.view(-1), group, async_op=is_async)
            started.append(_started(start, gathered, x, operation, ranks.ranks))
        if self.ledger is not None and kind is not None:
            # After the last start, so that all transfers overlap with the checksums.
            started[-1].arrival = self.ledger.post_same(kind, tensors, ranks.others, layer=layer)
            by_rank = zip(*(pending.received[0] for pending in started), strict=True)
            started[-1].messages = ranks.of_others(list(by_rank))
        return tuple(started)

    def all_to_all(
        self,
        sent: Tensor,
        group: ProcessGroup,
        *,
        operation: str,
        counts: tuple[Sequence[int], Sequence[int]] | None = None,
        kind: Kind | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Run ``start_all_to_all`` and wait; return the received tensor (``out`` if given)."""
        pending = self.start_all_to_all(
            sent, group, operation=operation, counts=counts, kind=kind, out=out, is_async=False
        )
        return pending.wait()[0]

    def start_all_to_all(
        self,
        sent: Tensor,
        group: ProcessGroup,
        *,
        operation: str,
        counts: tuple[Sequence[int], Sequence[int]] | None = None,
        kind: Kind | None = None,
        layer: int = -1,
        out: Tensor | None = None,
        is_async: bool = True,
    ) -> PendingTensors:
        """Start sending each rank its rows of ``sent``, and receiving this rank's rows from each, in group order.

        ``counts`` holds the row counts sent to each rank and received from each; without it all are equal.
        """
        ranks, received = members(group), out
        to_send, to_receive = (list(of_ranks) for of_ranks in counts or ((), ()))
        if received is None:
            rows = sum(to_receive) if counts else len(sent)
            received = sent.new_empty(rows, *sent.shape[1:])
        start = partial(dist.all_to_all_single, received, sent, to_receive, to_send, group, async_op=is_async)
        pending = _started(start, received, sent, operation, ranks.ranks)
        if self.ledger is not None and kind is not None:
            if counts is None:
                to_send = to_receive = [len(sent) // len(ranks.ranks)] * len(ranks.ranks)
            # The collective copies this rank's own rows locally, so it is not a message.
            remote_parts = zip(ranks.others, ranks.of_others(sent.split(to_send)), strict=True)
            by_rank = {receiver: [part] for receiver, part in remote_parts}
            pending.arrival = self.ledger.post(kind, by_rank, ranks.others, layer=layer)
            pending.messages = [[part] for part in ranks.of_others(received.split(to_receive))]
        return pending

    def all_reduce(self, x: Tensor, group: ProcessGroup, *, operation: str, largest: bool = False) -> Tensor:
        """Sum ``x`` over the ranks, or take the elementwise maximum, in place; return it."""
        op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
        named_collective(lambda: dist.all_reduce(x, op, group), operation, members(group).ranks)
        return x

    def broadcast(self, x: Tensor, source: int, group: ProcessGroup, *, operation: str) -> Tensor:
        """Overwrite ``x`` with the tensor from rank ``source``, in place; return it."""
        named_collective(lambda: dist.broadcast(x, source, group), operation, members(group).ranks)
        return x

    def gather(self, x: Tensor, group: ProcessGroup, *, operation: str) -> list[Tensor] | None:
        """Gather equally shaped tensors on the group's first rank; return None on the others."""
        ranks, parts = members(group), None
        if ranks.own == 0:
            parts = [torch.empty_like(x) for _ in ranks.ranks]
        named_collective(lambda: dist.gather(x, parts, ranks.ranks[0], group), operation, ranks.ranks)
        return parts

    def broadcast_object(self, value: Any, source: int, group: ProcessGroup, *, operation: str) -> Any:
        """Return the value from rank ``source``."""
        holder = [value]
        named_collective(lambda: dist.broadcast_object_list(holder, source, group), operation, members(group).ranks)
        return holder[0]

    def gather_objects(self, value: Any, group: ProcessGroup, *, operation: str) -> list[Any]:
        """Return every rank's value, in group order."""
        ranks = members(group).ranks
        values: list[Any] = [None] * len(ranks)
        named_collective(lambda: dist.all_gather_object(values, value, group), operation, ranks)
        return values


def _started(
    start: Callable[[], dist.Work | None], received: Tensor, sent: Tensor, operation: str, ranks: Sequence[int]
) -> PendingTensors:
    """Call ``start`` and wrap its work as ``PendingTensors``; without a work handle the collective has already
    completed.
    """
    work = named_collective(start, operation, ranks)
    works = ()
    if work is not None:
        works = (work,)
    return PendingTensors((received,), (sent,), works, operation, ranks)
