"""Ring that moves queries to the keys: with a KV cache, queries travel instead of keys and values.

A chunk's queries travel around the ring of all context ranks, and each rank's partial results return to the queries'
owner. Traffic grows with the chunk, not with the cache. Queries that every rank already has are not sent: their partial
results are gathered.

Axes: B batch, t query rows, H query heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longctx.kernels.attention.kernel_interface import merge_
from longctx.kernels.dtypes import accumulate_dtype
from longctx.tensor_bytes import as_bytes
from parallel.comm.communicator import PendingTensors
from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.runtime.activity import enter_hop
from parallel.transport.kv_block import PartialResult

Compute = Callable[[Tensor, int], PartialResult]
"""Compute the partial result over this rank's keys for queries from the rank ``hop`` positions before it."""


def query_ring_attention(mesh: Mesh, q_BtHD: Tensor, value_dim: int, compute: Compute) -> PartialResult:
    """Compute attention over all ranks' keys for this rank's queries. Collective.

    ::

        rank r      hop 0           hop 1                      hop 2
        compute     own queries     queries of r − 1           queries of r − 2
        in flight   q of hop 1      q of hop 2                 q of hop 3, results of hop 1
    """
    q_BtHD = q_BtHD.contiguous()
    pending_queries = _send_queries(mesh, q_BtHD, hop=1)
    out, lse = compute(q_BtHD, 0)
    returning = PendingTensors()
    for hop in range(1, mesh.context):
        enter_hop(hop)
        (visitors,) = pending_queries.wait()
        pending_queries = _send_queries(mesh, q_BtHD, hop + 1)
        part = compute(visitors, hop)
        # The previous hop's results, in flight while this hop computed. Merging hop by hop fixes the summation order.
        _merge(out, lse, returning)
        returning = _return_results(mesh, part, q_BtHD, value_dim, hop)
    _merge(out, lse, returning)
    return out, lse


def merge_gathered(mesh: Mesh, part: PartialResult) -> PartialResult:
    """Merge results over all ranks' keys for queries that every rank has; bitwise equal on all ranks. Collective."""
    if mesh.context_group is None:
        return part
    out, lse = part
    # Pack both as bytes, the wider dtype first: one collective instead of two.
    packed = torch.cat([as_bytes(x.contiguous()) for x in (lse, out)])
    gathered = mesh.comm.all_gather(
        packed,
        mesh.context_group,
        operation="gathering attention over cached keys",
        kind=Kind.CACHED_RESULTS,
    )
    lse_bytes = lse.numel() * lse.element_size()
    out, lse = torch.zeros_like(out), torch.full_like(lse, -torch.inf)
    for of_rank in gathered:
        # Clone: viewing bytes as a wider dtype requires an aligned offset.
        rank_lse = of_rank[:lse_bytes].clone().view(lse.dtype).view(lse.shape)
        rank_out = of_rank[lse_bytes:].clone().view(out.dtype).view(out.shape)
        merge_(out, lse, rank_out, rank_lse)
    return out, lse


def _send_queries(mesh: Mesh, q_BtHD: Tensor, hop: int) -> PendingTensors:
    """Start a hop: send local queries to the rank ``hop`` ahead, and receive those from the rank ``hop`` behind."""
    if hop >= mesh.context:  # past the last hop
        return PendingTensors()
    buffers = (torch.empty_like(q_BtHD),)
    return _start(mesh, (q_BtHD,), buffers, to=hop, source=-hop, kind=Kind.QUERIES)


def _return_results(mesh: Mesh, part: PartialResult, q_BtHD: Tensor, value_dim: int, hop: int) -> PendingTensors:
    """Start the return: send results to the queries' owner, and receive those for local queries."""
    shape = q_BtHD.shape[:-1]
    out = q_BtHD.new_empty((*shape, value_dim), dtype=accumulate_dtype(q_BtHD.dtype))
    lse = q_BtHD.new_empty(shape, dtype=torch.float64)
    send_tensors = [x.contiguous() for x in part]
    return _start(mesh, send_tensors, (out, lse), to=-hop, source=hop, kind=Kind.RESULTS)


def _merge(out: Tensor, lse: Tensor, returning: PendingTensors) -> None:
    received = returning.wait()
    if received:
        merge_(out, lse, *received)


def _start(
    mesh: Mesh, send_tensors: Sequence[Tensor], buffers: tuple[Tensor, ...], *, to: int, source: int, kind: Kind
) -> PendingTensors:
    """Send to the rank ``to`` positions after this one, and receive from the rank ``source`` positions after it."""
    receiver, sender = (mesh.context_peer((mesh.context_rank + by) % mesh.context) for by in (to, source))
    assert mesh.context_group is not None
    return mesh.comm.send_recv(
        {receiver: send_tensors},
        {sender: buffers},
        mesh.context_group,
        operation=f"exchanging {kind.words} with ranks {receiver} (to) and {sender} (from)",
        kind=kind,
        hop=max(to, source),
    )
