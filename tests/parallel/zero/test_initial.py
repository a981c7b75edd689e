"""Initial weights are those of one process to the last bit, in every stage and on every mesh; each is drawn once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from longctx.checkpoint_format import ROLES
from longctx.model.decoder import Decoder
from longctx.model.experts.experts import is_expert_weight
from longctx.model.layers.initialize import InitialTensor
from parallel.comm.world import sum_over_ranks
from parallel.mesh import Mesh
from parallel.parallelize import build_parallel_model
from parallel.zero import allocate, zero_state
from parallel.zero.optimizer import OptimizerOptions
from parallel.zero.zero_engine import ZeroEngine
from tests.helpers import on_ranks, run_distributed
from tests.parallel.experts.expert_cases import RanksRun, Spread, gather_whole
from tests.parallel.zero.test_loading import CASES, ODD, Case, own_part

SEED = 5


def count_draws() -> list[int]:
    """How many values are drawn from now on: a list that grows."""
    drawn: list[int] = []
    read = InitialTensor.read

    def counted(self: InitialTensor, start: int, count: int) -> Tensor:
        drawn.append(count)
        return read(self, start, count)

    InitialTensor.read = counted  # type: ignore[method-assign]
    return drawn


def check_initial_weights(cases: list[Case]) -> None:
    zero_state.BLOCK_VALUES = 1000  # as many blocks of a small tensor as a large one has
    oracle = {name: p.detach().flatten() for name, p in Decoder(ODD, seed=SEED).named_parameters()}
    drawn = count_draws()
    for stage, dtype, expert in cases:
        drawn.clear()
        run = RanksRun(ODD, Spread(stage=stage, dtype=dtype, expert=expert, seed=SEED))
        total = sum(len(values) for values in oracle.values())
        assert float(sum_over_ranks(torch.tensor(float(sum(drawn))))) == total, "each value is drawn on one rank"
        for name, p in run.engine.model.network.named_parameters():
            held = run.engine.partition.working_part(name, p).flatten()
            assert held.dtype == dtype
            assert torch.equal(held, own_part(run, name, p, oracle[name]).to(dtype)), f"{name} in ZeRO {stage}"
        whole = gather_whole(run.owned(), run.engine.shapes)
        for name, values in oracle.items():
            assert torch.equal(whole[name, ROLES[0]], values.to(dtype).float()), f"{name}'s master in ZeRO {stage}"
        assert not any(b.is_meta or b.any() for b in run.engine.model.network.buffers())


@pytest.mark.parametrize("world", [1, 2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.timeout(200)
def test_they_are_those_of_one_process(world):
    """A quick part of all: every stage, with and without experts across ranks."""
    cases = [case for case in CASES if case[2] <= world][:: 2 if world > 1 else 1]
    run_distributed(check_initial_weights, world, cases, timeout=150)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_they_are_in_every_case(world):
    every = [
        (stage, dtype, expert)
        for stage in range(4)
        for dtype in (torch.float32, torch.bfloat16)
        for expert in (1, 2, 4)
        if world % expert == 0 and not (stage == 0 and dtype == torch.bfloat16)
    ]
    run_distributed(check_initial_weights, world, every, timeout=600)


@on_ranks(2)
def test_a_model_without_a_seed_holds_no_memory() -> None:
    model = build_parallel_model(ODD, Mesh.build(context=2, expert=2), layout="zigzag", seed=None)
    for name, tensor in model.state_dict().items():
        assert tensor.is_meta, name
        if is_expert_weight(name):
            assert len(tensor) == ODD.num_experts // 2


@on_ranks(2)
def test_stage_3_holds_one_whole_parameter_at_a_time() -> None:
    model = build_parallel_model(ODD, Mesh.build(expert=2), layout="zigzag", seed=None)
    held: list[int] = []
    make_whole = allocate._make_whole

    def counted(p: nn.Parameter, dtype: torch.dtype, device: torch.device) -> None:
        make_whole(p, dtype, device)
        held.append(sum(not q.is_meta and q.numel() > 0 for q in model.parameters()))

    allocate._make_whole = counted
    ZeroEngine(model, stage=3, dtype=torch.bfloat16, accumulation=1, options=OptimizerOptions())
    assert held == [1] * len(list(model.parameters()))
