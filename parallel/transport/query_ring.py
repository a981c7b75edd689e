"""Queries visit the keys: what attention with a cache sends in place of keys and values.

A chunk's queries go around the ring of all context ranks, and what each rank's keys make of them returns to their
owner. What is sent grows with the chunk and not with the cache. A query that every rank has already goes nowhere: its
partial results are gathered.

Axes: B batch, t query rows, H query heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.kernels.attention.contract import merge_
from longctx.kernels.dtypes import accumulate_dtype
from longctx.tensor_bytes import as_bytes
from parallel.mesh import Mesh, others_in_context
from parallel.runtime.communicate import named_collective
from parallel.runtime.messages.kinds import Kind
from parallel.runtime.messages.ledger import Arrival
from parallel.runtime.watch.spans import enter_hop
from parallel.transport.block import PartialResult

_TAG_QUERIES, _TAG_RESULTS = 9, 11

Compute = Callable[[Tensor, int], PartialResult]
"""From the queries of the rank ``hop`` ranks before this one to their partial result over this rank's keys."""


def attend_by_visits(mesh: Mesh, q_BtHD: Tensor, value_dim: int, compute: Compute) -> PartialResult:
    """Attention of this rank's queries over the keys of all ranks. Collective.

    ::

        rank r      hop 0           hop 1                      hop 2
        compute     own queries     queries of r − 1           queries of r − 2
        in flight   q of hop 1      q of hop 2                 q of hop 3, results of hop 1
    """
    q_BtHD = q_BtHD.contiguous()
    arriving = _send_queries(mesh, q_BtHD, hop=1)
    out, lse = compute(q_BtHD, 0)
    returning = _Exchange()
    for hop in range(1, mesh.context):
        enter_hop(hop)
        (visitors,) = arriving.wait()
        arriving = _send_queries(mesh, q_BtHD, hop + 1)
        part = compute(visitors, hop)
        # Of the hop before: they travelled while this one computed. Hop by hop, so that sums have one order.
        _merge(out, lse, returning)
        returning = _return_results(mesh, part, q_BtHD, value_dim, hop)
    _merge(out, lse, returning)
    return out, lse


def merge_gathered(mesh: Mesh, part: PartialResult) -> PartialResult:
    """The result over the keys of all ranks, for queries that every rank has; the same bits on each. Collective."""
    if mesh.context_group is None:
        return part
    out, lse = part
    # As bytes, the larger numbers first: one collective for both.
    packed = torch.cat([as_bytes(x.contiguous()) for x in (lse, out)])
    gathered = packed.new_empty(mesh.context, len(packed))
    named_collective(
        lambda: dist.all_gather_into_tensor(gathered.view(-1), packed, group=mesh.context_group),
        f"rank {mesh.rank} gathering attention over the keys of its cache",
    )
    if mesh.ledger is not None:
        arrival = mesh.ledger.post_same(Kind.CACHED_RESULTS, [packed], others_in_context(mesh))
        arrival.note([[part] for rank, part in enumerate(gathered) if rank != mesh.context_rank])
    lse_bytes = lse.numel() * lse.element_size()
    out, lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for of_rank in gathered:
        # Cloned: a view as larger numbers must begin at a multiple of their size.
        rank_lse = of_rank[:lse_bytes].clone().view(lse.dtype).view(lse.shape)
        rank_out = of_rank[lse_bytes:].clone().view(out.dtype).view(out.shape)
        merge_(out, lse, rank_out, rank_lse)
    return out, lse


@dataclass
class _Exchange:
    """Tensors under way in both directions."""

    received: tuple[Tensor, ...] = ()
    sent: tuple[Tensor, ...] = ()
    """What leaves stays alive until it is through."""
    works: list[dist.Work] = field(default_factory=list)
    described: str = ""
    arrival: Arrival | None = None
    """Where to note what has arrived; None where nobody compares it, or nothing is to come."""

    def wait(self) -> tuple[Tensor, ...]:
        """Return what arrived. ClusterError when a peer is gone or too late."""
        named_collective(lambda: [work.wait() for work in self.works], self.described)
        self.sent = ()
        if self.arrival is not None:
            self.arrival.note([self.received])
        return self.received


def _send_queries(mesh: Mesh, q_BtHD: Tensor, hop: int) -> _Exchange:
    """Start a hop: this rank's queries go to the rank ``hop`` after it, those of the rank as far before it come."""
    if hop >= mesh.context:  # nothing follows the last hop
        return _Exchange()
    buffers = (torch.empty_like(q_BtHD),)
    return _start(mesh, (q_BtHD,), buffers, to=hop, source=-hop, tag=_TAG_QUERIES, kind=Kind.QUERIES)


def _return_results(mesh: Mesh, part: PartialResult, q_BtHD: Tensor, value_dim: int, hop: int) -> _Exchange:
    """Start the way back: results go to the queries' owner, those of this rank's queries come."""
    shape = q_BtHD.shape[:-1]
    out = q_BtHD.new_empty((*shape, value_dim), dtype=accumulate_dtype(q_BtHD.dtype))
    lse = q_BtHD.new_empty(shape, dtype=torch.float64)
    outgoing = [x.contiguous() for x in part]
    return _start(mesh, outgoing, (out, lse), to=-hop, source=hop, tag=_TAG_RESULTS, kind=Kind.RESULTS)


def _merge(out: Tensor, lse: Tensor, returning: _Exchange) -> None:
    received = returning.wait()
    if received:
        merge_(out, lse, *received)


def _start(
    mesh: Mesh, outgoing: Sequence[Tensor], buffers: tuple[Tensor, ...], *, to: int, source: int, tag: int, kind: Kind
) -> _Exchange:
    """Send to the rank ``to`` after this one and receive from the rank ``source`` after it."""
    receiver, sender = (mesh.context_peer((mesh.context_rank + by) % mesh.context) for by in (to, source))
    described = f"rank {mesh.rank} exchanging {kind.words} with ranks {receiver} (to) and {sender} (from)"
    ops = []
    for n, x in enumerate(outgoing):
        ops.append(dist.P2POp(dist.isend, x, receiver, mesh.context_group, tag + n))
    for n, x in enumerate(buffers):
        ops.append(dist.P2POp(dist.irecv, x, sender, mesh.context_group, tag + n))
    # One batch: NCCL needs sends and receives of two peers grouped, or each waits for the other's receive.
    works = named_collective(lambda: dist.batch_isend_irecv(ops), described)
    arrival = None
    if mesh.ledger is not None:
        hop = max(to, source)
        arrival = mesh.ledger.post(kind, {receiver: outgoing}, [sender], hop=hop)
    return _Exchange(buffers, tuple(outgoing), works, described, arrival)
