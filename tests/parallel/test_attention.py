"""Attention across ranks against one process in float64: values and every gradient."""

from __future__ import annotations

import pytest
import torch

from longctx.errors import ConfigError
from longctx.kernels.contract import Scores
from longctx.kernels.reference import ReferenceKernel
from longctx.kernels.select import KERNELS
from longctx.model.cores import AttentionMask, document_pairs
from parallel.attention import attend
from parallel.layout import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule import Schedule
from tests.helpers import run_distributed

DOCUMENTS = {
    "one": lambda T: [0, T],
    "packed": lambda T: [0, 1, 5, 5, T // 3, T // 3 + 1, T - 7, T],
    "short": lambda T: [*range(0, T, 3), T],
}


def oracle(q, k, v, dout, cu_seqlens, causal):
    """Output and gradients of one process in float64."""
    pairs, kernel = document_pairs(AttentionMask(tuple(cu_seqlens), causal)), ReferenceKernel()
    q, k, v, dout = (x.double() for x in (q, k, v, dout))
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, pairs, scores=Scores(scale=scale))
    return out, *kernel.backward(dout, q, k, v, out, lse, pairs, scores=Scores(scale=scale))[:3]


def relative_error(got, want):
    """Frobenius."""
    return ((got.double() - want).norm() / want.norm()).item()


def inputs(T, heads, kv_heads, dim, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(1, T, heads, dim), (1, T, kv_heads, dim), (1, T, kv_heads, dim), (1, T, heads, dim)]
    return [torch.randn(*s, generator=generator, dtype=torch.float64).to(dtype) for s in shapes]


def check_attention(T, layout_kind, documents, causal, dtype, kernel, bound):
    mesh = Mesh.build(context=torch.distributed.get_world_size())
    rank = mesh.context_rank
    q, k, v, dout = inputs(T, 4, 2, 16, dtype)
    layout = SequenceLayout.build(layout_kind, T, mesh.context)
    cu_seqlens = DOCUMENTS[documents](T)
    schedule = Schedule.build(layout, cu_seqlens, causal=causal)
    mine = [layout.split(x, rank, 1).requires_grad_() for x in (q, k, v)]
    out = attend(*mine, schedule=schedule, mesh=mesh, kernel=kernel)
    out.backward(layout.split(dout, rank, 1))
    wanted = oracle(q, k, v, dout, cu_seqlens, causal)
    for name, got, want in zip(("out", "dq", "dk", "dv"), (out, *(x.grad for x in mine)), wanted, strict=True):
        error = relative_error(got.detach(), layout.split(want, rank, 1))
        assert error <= bound, f"{name} on rank {rank}: relative error {error:.2e} > {bound:.0e}"
    assert out.dtype == dtype


# 5e-7: one process's fp32 SDPA is 4e-7 off; bf16 outputs and gradients carry 8 bits.
CASES = [(torch.float32, "cpu_flash", 5e-7), (torch.float64, "reference", 1e-14), (torch.bfloat16, "cpu_flash", 1.5e-2)]


@pytest.mark.parametrize(("dtype", "kernel", "bound"), CASES)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_layout_and_packing_equals_one_process(world_size, dtype, kernel, bound):
    run_distributed(check_layouts, world_size, dtype, kernel, bound)


def check_layouts(dtype, kernel, bound):
    for layout in ("contiguous", "zigzag"):
        for documents in DOCUMENTS:
            for causal in (True, False):
                check_attention(96, layout, documents, causal, dtype, kernel, bound)


def test_repetition_gives_equal_bits():
    run_distributed(check_repetition, 3)


def check_repetition():
    mesh = Mesh.build(context=3)
    layout = SequenceLayout.build("zigzag", 96, 3)
    schedule = Schedule.build(layout, DOCUMENTS["packed"](96))
    seen = []
    for _ in range(2):
        q, k, v, dout = (layout.split(x, mesh.context_rank, 1) for x in inputs(96, 4, 2, 16, torch.float32))
        leaves = [x.requires_grad_() for x in (q, k, v)]
        out = attend(*leaves, schedule=schedule, mesh=mesh)
        out.backward(dout)
        seen.append([out, *(x.grad for x in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*seen, strict=True))


def test_rows_of_a_batch_equal_their_flattened_sequence():
    q, k, v, _ = inputs(24, 4, 2, 16, torch.float32)
    schedule = Schedule.build(SequenceLayout.build("contiguous", 24, 1), [0, 5, 12, 24])
    flat = attend(q, k, v, schedule=schedule, mesh=Mesh.build())
    rows = [x.view(2, 12, *x.shape[2:]) for x in (q, k, v)]
    assert torch.equal(attend(*rows, schedule=schedule, mesh=Mesh.build()).view(flat.shape), flat)


def test_stacked_sequences_share_a_schedule():
    stacked = [
        torch.cat(pair) for pair in zip(*(inputs(12, 4, 2, 16, torch.float32, s)[:3] for s in (1, 2)), strict=True)
    ]
    schedule = Schedule.build(SequenceLayout.build("contiguous", 12, 1), [0, 5, 12])
    out = attend(*stacked, schedule=schedule, mesh=Mesh.build())
    for row in range(2):
        alone = attend(*(x[row : row + 1] for x in stacked), schedule=schedule, mesh=Mesh.build())
        torch.testing.assert_close(out[row : row + 1], alone)


def test_wrong_share_is_named():
    q, k, v, _ = inputs(8, 4, 2, 16, torch.float32)
    schedule = Schedule.build(SequenceLayout.build("contiguous", 16, 1))
    with pytest.raises(ConfigError, match="8 queries"):
        attend(q, k, v, schedule=schedule, mesh=Mesh.build())


def test_unknown_kernel_names_the_known_ones():
    q, k, v, _ = inputs(8, 4, 2, 16, torch.float32)
    schedule = Schedule.build(SequenceLayout.build("contiguous", 8, 1))
    with pytest.raises(ConfigError, match=next(iter(KERNELS))):
        attend(q, k, v, schedule=schedule, mesh=Mesh.build(), kernel="fast")
