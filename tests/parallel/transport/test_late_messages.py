"""Messages that travel when they are waited for, and no earlier: equal bits, whichever way they go."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.model.attention.attention_work import forward_work
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule import Schedule
from parallel.transport.kv_block import KVBlock
from parallel.transport.query_ring import query_ring_attention
from parallel.transport.transport_choice import build_transport
from tests.helpers import on_ranks
from tests.late_messages import late_messages
from tests.parallel.transport.test_transports import DOCUMENTS, HEAD_DIM, MASKS, SCORES, TOKENS, attend_here, inputs

CASES = [("contiguous", "sinks"), ("balanced", "causal"), ("striped", "sparse")]
"""Layouts and masks: rows in one range, which are sent where they are, and in several, which are copied first."""


@on_ranks(4, timeout=110)
def test_what_is_sent_stays_and_what_arrives_is_read_behind_the_wait():
    mesh = Mesh.build(context=4, ranks_per_node=2)
    for kind, mask in CASES:
        schedule = Schedule.build(SequenceLayout.build(kind, TOKENS, 4, DOCUMENTS), DOCUMENTS, **MASKS[mask])
        for transport in ("p2p", "two_level", "all_gather"):
            wanted = attend_here(schedule, mesh, transport)
            with late_messages():
                got = attend_here(schedule, mesh, transport)
            for name, want in wanted.items():
                assert torch.equal(got[name], want), f"{name} on rank {mesh.rank}, {kind}, {mask}, {transport}"


@on_ranks(4, timeout=110)
def test_a_copy_that_is_sent_stays():
    """Of keys that lie apart a transport sends a copy of its own."""
    mesh, kernel = Mesh.build(context=4, ranks_per_node=2), CpuFlashKernel()
    schedule = Schedule.build(SequenceLayout.build("zigzag", TOKENS, 4, DOCUMENTS), DOCUMENTS)
    q, k, v, _ = (schedule.layout.split(x, mesh.context_rank, 1) for x in inputs())
    k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k, v))

    def compute(block: KVBlock) -> tuple[Tensor, Tensor]:
        keys_and_values = (block.keys_BsKD, block.values_BsKV)
        return forward_work(
            q[:, block.queries], *keys_and_values, block.work, lambda *args: kernel.forward(*args, scores=SCORES)
        )

    for transport in ("p2p", "two_level", "all_gather"):
        wanted = build_transport(transport, schedule, mesh).forward(k, v, compute)
        with late_messages():
            got = build_transport(transport, schedule, mesh).forward(k, v, compute)
        assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True)), transport


@on_ranks(3)
def test_visits_bring_back_what_they_found():
    mesh = Mesh.build(context=3)
    generator = torch.Generator().manual_seed(mesh.rank)
    q, k, v = torch.randn(3, 1, 7, 2, HEAD_DIM, generator=generator).unbind()

    def compute(queries: Tensor, hop: int) -> tuple[Tensor, Tensor]:
        scores = torch.einsum("bqhd,bkhd->bqhk", queries, k)
        return torch.einsum("bqhk,bkhd->bqhd", scores.softmax(-1), v), scores.logsumexp(-1).double()

    wanted = query_ring_attention(mesh, q, HEAD_DIM, compute)
    with late_messages():
        got = query_ring_attention(mesh, q, HEAD_DIM, compute)
    assert all(torch.equal(x, y) for x, y in zip(got, wanted, strict=True))
    everything = [torch.empty_like(q) for _ in range(2 * mesh.context)]
    for n, x in enumerate((k, v)):
        dist.all_gather(everything[n * mesh.context : (n + 1) * mesh.context], x)
    keys, values = torch.cat(everything[: mesh.context], 1), torch.cat(everything[mesh.context :], 1)
    plain = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2).double() for x in (q, keys, values)), scale=1.0
    )
    # float32's rounding in the partial results.
    torch.testing.assert_close(got[0].double(), plain.transpose(1, 2), rtol=1e-4, atol=1e-5)
