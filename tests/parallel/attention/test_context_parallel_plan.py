"""Plans of attention over ranks: one agreement each, the same refusal on every rank, a degree for each batch."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import parallel.attention.context_parallel_plan
import parallel.attention.state_plans
from longctx.errors import ClusterError, ConfigError
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.attention.kernel_selection import KERNELS, resolve_kernel
from longctx.model.attention.core import AttentionShapes
from longctx.model.training_pass import Execution
from parallel.attention.context_parallel_plan import ContextParallelOptions, ContextParallelPlan
from parallel.attention.context_parallel_softmax import planned_attention
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.schedule.attention_schedule import Schedule
from tests.helpers import on_ranks
from tests.oracles import packed_batch
from tests.parallel.attention.attention_cases import Case, by_definition
from tests.parallel.attention.test_layer_kinds import MODEL as LAYER_KINDS

MODEL = replace(LAYER_KINDS, num_layers=8, layers=("full", "window", "linear", "sparse"))


def shard_of(mesh: Mesh, layout: SequenceLayout, seed: int = 3):
    batch = packed_batch(rows=2, seq_len=48, vocab_size=64, seed=seed).flatten_rows()
    return replace(batch.map_tokens(lambda x: layout.split(x, mesh.context_rank, 1)), placement=layout)


@on_ranks(2)
def test_ranks_agree_once_a_forward_pass_and_kind_of_layer():
    mesh, layout = Mesh.build(context=2), SequenceLayout.build("zigzag", 96, 2)
    lm = build_parallel_model(MODEL, mesh, layout="zigzag", execution=Execution("attention"))
    mine, agreed = shard_of(mesh, layout), []
    agree = parallel.attention.context_parallel_plan.verify_across_ranks

    def counted(schedule, *arguments):
        agreed.append(schedule)
        return agree(schedule, *arguments)

    modules = (parallel.attention.context_parallel_plan, parallel.attention.state_plans)
    with (
        patch.object(modules[0], "verify_across_ranks", counted),
        patch.object(modules[1], "verify_across_ranks", counted),
    ):
        for passes in (1, 2):
            lm(mine)[0].backward()
            assert len(agreed) == len(MODEL.layers) * passes
    assert all(schedule.layout is layout for schedule in agreed), "plans start from the layout of the batch"


@on_ranks(3)
def test_ranks_that_plan_otherwise_are_all_refused_alike():
    mesh, layout = Mesh.build(context=3), SequenceLayout.build("contiguous", 96, 3)
    odd = mesh.rank == 1
    full = replace(MODEL, layers=("full",), window=0, sparse_stride=0, num_layers=2)

    def refusal(error, *, config=full, placement=None, seed=3, **options) -> str:
        lm = build_parallel_model(config, mesh, layout="contiguous", **options)
        mine = replace(shard_of(mesh, layout, seed), placement=placement)
        with pytest.raises(error) as refused:
            lm(mine)
        messages: list = [None] * 3
        dist.all_gather_object(messages, str(refused.value), group=mesh.control_group)
        assert len(set(messages)) == 1, messages
        return messages[0]

    linear = replace(full, layers=("linear",))
    assert "different attention calls" in refusal(ClusterError, seed=3 + odd)
    assert "different attention calls" in refusal(ClusterError, seed=3 + odd, config=linear)
    assert "transport all_gather" in refusal(ClusterError, transport="all_gather" if odd else "p2p")
    # A rank that lacks a library chooses another kernel by itself; the message says which rank has which.
    resolve_kernel.cache_clear()
    with patch.object(KERNELS["cpu_flash"], "supports", return_value="not installed" if odd else None):
        said = refusal(ClusterError)
    resolve_kernel.cache_clear()
    assert [rank.split("; schedule")[0].rsplit(" ", 1)[1] for rank in said.splitlines() if "context rank" in rank] == [
        "cpu_flash",
        "blockwise",
        "cpu_flash",
    ]
    assert "set a kernel that all nodes have" in said
    assert "different attention calls" in refusal(ClusterError, config=replace(full, num_heads=2) if odd else full)
    # One rank alone cannot do it: the others hear why instead of waiting.
    assert "context rank 1: parallel.kernel='fast' is unknown" in refusal(ConfigError, kernel="fast" if odd else "auto")
    lies = SequenceLayout.build("contiguous", 96, 6)
    assert "context rank 0: the schedule has context 6" in refusal(ConfigError, placement=lies)
    assert "context rank 0: the schedule has context 6" in refusal(ConfigError, placement=lies, config=linear)


@on_ranks(4)
def test_each_batch_may_have_a_degree_of_its_own():
    """The same ranks as one ring of four, as two of two and each alone, in turns."""
    case = Case(dtype=torch.float64)
    q, k, v, dout = case.inputs()
    wanted = by_definition(case)
    shapes = AttentionShapes.of(q, k, v, ScoreRules(scale=case.head_dim**-0.5))
    plans = []
    for degree in (4, 2, 1):
        mesh, layout = Mesh.build(context=degree), SequenceLayout.build("zigzag", case.tokens, degree)
        shard = replace(shapes, tokens=layout.num_local(mesh.context_rank))
        schedule = Schedule.build(layout, case.cu_seqlens)
        plans.append(ContextParallelPlan.build(schedule, mesh, shard, ContextParallelOptions("reference")))
    for plan in (*plans, *plans[::-1]):
        layout, rank = plan.schedule.layout, plan.mesh.context_rank
        leaves = [layout.split(x, rank, 1).requires_grad_() for x in (q, k, v)]
        out = planned_attention(*leaves, plan)
        out.backward(layout.split(dout, rank, 1))
        for name, found in zip(("out", "dq", "dk", "dv"), (out, *(x.grad for x in leaves)), strict=True):
            torch.testing.assert_close(found, layout.split(wanted[name], rank, 1), rtol=1e-12, atol=1e-12)
