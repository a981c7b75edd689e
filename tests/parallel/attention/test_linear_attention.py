"""Linear attention across ranks against its closed form: values, every gradient, and the bytes that travel."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed as dist

from longctx.errors import ClusterError, ConfigError
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import AttentionShapes
from parallel.attention.context_parallel_linear import planned_linear_attention
from parallel.attention.state_plans import StatesOfBatch
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.states import StatePlan
from tests.helpers import on_ranks
from tests.longctx.kernels.test_linear_attention import closed_form, inputs, relative_errors

DOCUMENTS = {
    "one": lambda T: [0, T],
    "packed": lambda T: [0, 1, 5, 5, T // 3, T // 3 + 1, T - 7, T],  # longer than a share, single tokens, an empty one
    "short": lambda T: [*range(0, T, 3), T],
}
HEADS = (4, 2, 6, 5)
"""Query heads, key heads, head size, value head size."""


def linear_attend(q, k, v, *, layout, cu_seqlens=None, mesh, causal=True, **options):
    """Linear attention by a plan of its own."""
    shapes = AttentionShapes.of(q, k, v, ScoreRules(scale=1.0))
    plan = StatesOfBatch.build(
        StatePlan.build(layout, cu_seqlens, causal=causal), mesh, shapes, layer_kind="linear attention"
    )
    return planned_linear_attention(q, k, v, plan, **options)


def run_one(layout, cu_seqlens, causal, mesh, dtype, **options):
    """This rank's output and gradients, and the closed form's in float64."""
    leaves, dout = inputs(layout.num_tokens, *HEADS, dtype=dtype, batch=1)
    rank = mesh.context_rank
    mine = [layout.split(x.detach(), rank, 1).requires_grad_() for x in leaves]
    out = linear_attend(*mine, layout=layout, cu_seqlens=cu_seqlens, mesh=mesh, causal=causal, **options)
    got = (out, *torch.autograd.grad(out, mine, layout.split(dout, rank, 1)))
    exact = [x.detach().double().requires_grad_() for x in leaves]
    want = closed_form(*exact, cu_seqlens, causal)
    wanted = (want, *torch.autograd.grad(want, exact, dout.double()))
    return got, [layout.split(x, rank, 1) for x in wanted]


# 5e-7: sums in float32. bf16: as in one process, rounded once, and queries' gradients by the rounded output besides.
BOUNDS = {torch.float64: 1e-13, torch.float32: 5e-7, torch.bfloat16: 5e-3}


@pytest.mark.few(1)
@pytest.mark.parametrize("world_size", [1, 2, 3, pytest.param(4, marks=pytest.mark.slow)])
@on_ranks("world_size")
def test_every_layout_and_packing_is_the_closed_form():
    T, world = 96, dist.get_world_size()
    for ulysses in (1, 2, 3):
        if world % ulysses:
            continue
        mesh = Mesh.build(context=world, ulysses=ulysses)
        for kind in ("contiguous", "zigzag", "balanced"):
            for name, documents in DOCUMENTS.items():
                layout = SequenceLayout.build(kind, T, world, documents(T), ulysses)
                for causal in (True, False):
                    for dtype, bound in BOUNDS.items() if ulysses == 1 else [(torch.float64, 1e-13)]:
                        got, want = run_one(layout, documents(T), causal, mesh, dtype, chunk=8)
                        errors = relative_errors(got, want)
                        where = f"{kind}, {name}, causal={causal}, {dtype}, ulysses {ulysses}, rank {mesh.rank}"
                        assert max(errors) <= bound, f"{where}: {errors}"
                        assert all(x.dtype == dtype for x in got), where


@on_ranks(3)
def test_bytes_do_not_grow_with_the_sequence_bits_repeat_and_ranks_agree():
    mesh = Mesh.build(context=3)
    _, kv_heads, D, V = HEADS
    real, seen = dist.all_gather_into_tensor, []

    def counting(everything, mine, *group, **options):
        # Not the agreement's fingerprints.
        if mine.dtype != torch.uint8:
            seen.append((everything.numel() - mine.numel()) * mine.element_size())
        return real(everything, mine, *group, **options)

    for kind, states in (("contiguous", 1), ("zigzag", 2)):
        for T in (96, 384):
            layout = SequenceLayout.build(kind, T, 3)
            want = 2 * states * kv_heads * D * (V + 1) * 4
            seen.clear()
            with mock.patch.object(dist, "all_gather_into_tensor", counting):
                first, _ = run_one(layout, [0, T], True, mesh, torch.float32)
                assert seen == [want, want]  # forward and backward
                again, _ = run_one(layout, [0, T], True, mesh, torch.float32)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    layout = SequenceLayout.build("contiguous", 96, 3)
    seen.clear()
    with mock.patch.object(dist, "all_gather_into_tensor", counting):
        run_one(layout, [0, 10, 32, 64, 96], True, mesh, torch.float32)
    assert not seen, "no document is shared, yet states travelled"
    with pytest.raises(ClusterError, match="different"):
        run_one(layout, [0, 10 + mesh.rank, 96], True, mesh, torch.float32)


def test_only_shared_documents_travel():
    layout = SequenceLayout.build("contiguous", 12, 3)
    plan = StatePlan.build(layout, [0, 2, 7, 7, 12])  # document 1 is on ranks 0 and 1, document 3 on 1 and 2
    given = [[(x.document, x.start) for x in of] for of in plan.given]
    taken = [[(x.document, x.start) for x in of] for of in plan.taken]
    assert (given, taken) == ([[(1, 2)], [(3, 7)], []], [[], [(1, 4)], [(3, 8)]])
    assert plan.segments(1).documents.bounds == (0, 3, 4)
    both = StatePlan.build(layout, [0, 2, 7, 7, 12], causal=False)
    assert both.given == both.taken
    assert (both.num_given, plan.num_given) == (2, 1)


def test_neighbouring_runs_are_one_segment():
    layout = SequenceLayout.build("zigzag", 12, 3)  # rank 2 holds parts 2 and 3
    assert StatePlan.build(layout).segments(2).documents.bounds == (0, 4)
    assert StatePlan.build(layout).segments(0).documents.bounds == (0, 2, 4)


def test_rows_of_a_batch_and_stacked_sequences():
    leaves, _ = inputs(24, *HEADS, batch=1)
    flat = linear_attend(
        *leaves, layout=SequenceLayout.build("contiguous", 24, 1), cu_seqlens=[0, 5, 12, 24], mesh=Mesh.build()
    )
    rows = [x.view(2, 12, *x.shape[2:]) for x in leaves]
    layout = SequenceLayout.build("contiguous", 24, 1)
    assert torch.equal(
        linear_attend(*rows, layout=layout, cu_seqlens=[0, 5, 12, 24], mesh=Mesh.build()).view(flat.shape), flat
    )
    stacked = linear_attend(*rows, layout=SequenceLayout.build("contiguous", 12, 1), mesh=Mesh.build())
    torch.testing.assert_close(stacked, closed_form(*rows, (0, 12), True))


def test_bad_input_is_named():
    leaves, _ = inputs(8, *HEADS, batch=1)
    with pytest.raises(ConfigError, match="mesh has context 1"):
        linear_attend(*leaves, layout=SequenceLayout.build("contiguous", 8, 2), mesh=Mesh.build())
    with pytest.raises(ConfigError, match="received 8 queries"):
        linear_attend(*leaves, layout=SequenceLayout.build("contiguous", 16, 1), mesh=Mesh.build())
    with pytest.raises(ConfigError, match="contiguous"):
        StatePlan.build(SequenceLayout.build("striped", 16, 2))
    with pytest.raises(ConfigError, match="ascend"):
        StatePlan.build(SequenceLayout.build("zigzag", 16, 2), [0, 20])
