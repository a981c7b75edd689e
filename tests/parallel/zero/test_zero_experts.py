"""Experts shared out over ranks against one plain float32 process: loss, gradients, norm, weights, counts and bias."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.kernels.processor import MatmulMode
from longctx.model.decoder import Decoder
from longctx.model.experts.experts import is_expert_weight
from parallel.parallelize import check_experts
from tests.helpers import run_distributed
from tests.parallel.experts.expert_cases import (
    BETAS,
    CLIP,
    CONFIG,
    RanksRun,
    Run,
    Spread,
    State,
    fixed_routing,
    gather_whole,
    train_by_definition,
)

BOUND = 1e-5
"""Relative, in the Frobenius norm. AdamW makes lr · eps · d / (|g| + eps)² of the rounding d of a gradient g:
with eps = 1e-8 a weight whose gradient is all but zero moves by up to lr either way. Gradients here are of size 1e-3,
and eps is 1e-4."""
FEW, MANY = 3, 10
WAYS = {
    0: {"layout": "contiguous"},
    1: {"layout": "zigzag"},
    2: {"layout": "balanced", "tile_tokens": 7, "recompute_experts": "all"},
    3: {"layout": "striped", "tile_tokens": 5, "keep": "attention"},
}
"""What else differs in each ZeRO stage: none of it may change a result."""
SCOPES: dict[str, ModelConfig] = {
    "sequence": CONFIG,
    "global_batch": replace(CONFIG, balance_scope="global_batch", score_function="softmax"),
    "micro_batch": replace(CONFIG, balance_scope="micro_batch"),
}
MESHES = [
    (world, context, expert)
    for world, context, expert in product((1, 2, 4), (1, 2, 4), (1, 2, 4))
    if world % context == 0 and world // context <= 2 and world % expert == 0
]
"""Ranks, those that share a sequence, those that share out the experts: data degree 1 or 2."""


@pytest.fixture(scope="module")
def expected(tmp_path_factory) -> Callable[[str, int], Path]:
    """File of what one process finds, by scope of the balance loss and number of steps, with fixed and live routing."""
    folder = tmp_path_factory.mktemp("expected")

    @cache
    def find(scope: str, steps: int) -> Path:
        config, file = SCOPES[scope], folder / f"{scope}_{steps}"
        runs = {"fixed": train_by_definition(config, steps, fixed_routing(steps))}
        torch.save({**runs, "live": train_by_definition(config, steps)}, file)
        return file

    return find


def check_parity(expected: Path, scope: str, spreads: list[Spread], kinds: Sequence[str] = ("fixed", "live")) -> None:
    runs = torch.load(expected, weights_only=False)
    for spread in spreads:
        for kind in kinds:
            wanted: Run = runs[kind]
            worst, flips = compare(SCOPES[scope], spread, wanted, fixed=kind == "fixed")
            routed = sum(int(c.sum()) for c in wanted.counts)
            if dist.get_rank() == 0:
                sys.stderr.write(
                    f"{dist.get_world_size()} ranks, context {spread.context}, expert {spread.expert}, ZeRO "
                    f"{spread.stage}, {scope}, {kind} routing: {', '.join(worst)}; {flips} of {routed} fell otherwise\n"
                )


def compare(config: ModelConfig, spread: Spread, wanted: Run, *, fixed: bool) -> tuple[list[str], int]:
    """The largest error of each kind, and choices that fell otherwise. While there are none, errors are bounded."""
    steps = len(wanted.losses)
    runner, routing = RanksRun(config, spread), fixed_routing(steps) if fixed else None
    worst: dict[str, tuple[float, str]] = {}
    flips, before = 0, None
    for step in range(steps):
        runner.step(step, routing)
        got = gather_whole(runner.owned(), runner.engine.shapes)
        flips += int((runner.run.counts[step] - wanted.counts[step]).abs().sum()) // 2
        errors = errors_of(runner.run, got, before, wanted, step)
        before, where = got, f"{spread}, step {step}"
        assert wanted.norms[step] > CLIP, "clipping must be active"
        assert not (fixed and flips), f"{where}: counts are {runner.run.counts[step]}"
        if not flips:
            assert max(errors.values()) <= BOUND, f"{where}: { ({k: v for k, v in errors.items() if v > BOUND}) }"
            check_every_rank(runner, wanted.states[step], where=where)
        if fixed and step == 0:
            check_unchosen(got)
        for what, error in errors.items():
            kind = what.split(" of ")[0]
            worst[kind] = max(worst.get(kind, (0.0, "")), (error, what))
    return [f"{what} {error:.1e}" for error, what in worst.values()], flips


def errors_of(run: Run, got: State, before: State | None, wanted: Run, step: int) -> dict[str, float]:
    """Relative errors of a step: loss, gradient norm, and of every tensor gradient, squares and weights."""
    errors = {
        "loss": _relative(run.losses[step], wanted.losses[step]),
        "norm": _relative(run.norms[step], wanted.norms[step]),
    }
    want, earlier = wanted.states[step], wanted.states[step - 1] if step else None
    assert got.keys() == want.keys()
    for name in (name for name, role in want if role == "exp_avg"):
        gradients = _last_gradient(got, before, name), _last_gradient(want, earlier, name)
        errors[f"gradient of {name}"] = _relative(*gradients)
        for role, what in (("exp_avg_sq", "squares"), ("master", "weights")):
            errors[f"{what} of {name}"] = _relative(got[name, role], want[name, role])
    return errors


def _last_gradient(state: State, before: State | None, name: str) -> torch.Tensor:
    """A step's gradient, as clipped: what it added to the running mean."""
    then = 0.0 if before is None else before[name, "exp_avg"]
    return (state[name, "exp_avg"] - BETAS[0] * then) / (1 - BETAS[0])


def check_every_rank(runner: RanksRun, want: State, *, where: str) -> None:
    """What a rank holds whole: every buffer, and below stage 3 its share of the weights, as they are used."""
    decoder = runner.engine.model.network
    for name, buffer in decoder.named_buffers():
        error = (buffer - want[name, "master"]).abs().max()
        assert error <= 1e-7, f"{where}: {name} is {error:.1e} off on rank {dist.get_rank()}"
    if runner.engine.stage == 3:
        return
    for name, p in decoder.named_parameters():
        whole = want[name, "master"].view(decoder.logical_shape(name, p.shape))
        own = whole[decoder.dispatcher.local_experts] if is_expert_weight(name) else whole
        error = (p.detach() - own).norm() / whole.norm()
        assert error <= BOUND, f"{where}: {name} is {error:.1e} off on rank {dist.get_rank()}"


def check_unchosen(state: State) -> None:
    """An expert that nobody chose has a gradient of exact zeros: so have its first moments."""
    weights = [name for name, role in state if role == "exp_avg" and is_expert_weight(name)]
    assert len(weights) == 2 * 4, "two layers of two projections and their biases"
    for name in weights:
        moment = state[name, "exp_avg"].view(CONFIG.num_experts, -1)
        assert not moment[5].any(), name
        assert all(moment[e].any() for e in (0, 1, 7)), name


def _relative(got, want) -> float:
    got, want = torch.as_tensor(got), torch.as_tensor(want)
    assert not (want.norm() == 0 and got.norm() > 0)
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


QUICK = [
    Spread(context=2, expert=2, stage=1, **WAYS[1]),
    Spread(context=1, expert=2, stage=3, **WAYS[3]),
]


@pytest.mark.few(1)
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("spread", "kinds"),
    [(0, ("fixed", "live")), (1, ("fixed",)), pytest.param(1, ("live",), marks=pytest.mark.slow)],
    ids=str,
)
def test_two_ranks_train_like_one_process(expected, spread, kinds):
    run_distributed(check_parity, 2, expected("sequence", FEW), "sequence", [QUICK[spread]], kinds, timeout=100)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("stage", "scope"),
    [(0, "sequence"), (1, "sequence"), (2, "sequence"), (2, "global_batch"), (3, "sequence"), (3, "micro_batch")],
)
@pytest.mark.parametrize(("world", "context", "expert"), MESHES)
def test_every_combination_trains_like_one_process(expected, world, context, expert, stage, scope):
    spread = Spread(context=context, expert=expert, stage=stage, **WAYS[stage])
    run_distributed(check_parity, world, expected(scope, MANY), scope, [spread], timeout=300)


def check_bfloat16(expected: Path, products: MatmulMode, stages: Sequence[int]) -> None:
    """A layer rounds at most 30 times forward and 30 times back, in either way: after three a gradient is 3 % off.

    That bounds the norm. Logits are 0.11 in size, of which 3 % are less than 1e-3 of a loss of 4.2, though all fell to
    one side. AdamW passes on a gradient's relative error at most; a gradient that is a difference, as a key's bias has
    it, may be three times as far off.
    """
    wanted: Run = torch.load(expected, weights_only=False)["fixed"]
    for stage in stages:
        spread = Spread(context=2, expert=2, stage=stage, dtype=torch.bfloat16, products=products)
        runner = RanksRun(CONFIG, spread)
        for step in range(FEW):
            runner.step(step, fixed_routing(FEW))
        for got, want, bound in ((runner.run.losses, wanted.losses, 1e-3), (runner.run.norms, wanted.norms, 3e-2)):
            assert got == pytest.approx(want, rel=bound), f"ZeRO {stage}"
        whole = gather_whole(runner.owned(), runner.engine.shapes)
        for (name, role), got in whole.items():
            if role != "master" or (name, "exp_avg") not in whole:
                continue
            start = Decoder(CONFIG, seed=0).get_parameter(name).detach().flatten()
            moved, want = got - start.bfloat16().float(), wanted.states[FEW - 1][name, role] - start
            assert _relative(moved, want) < 0.1, f"ZeRO {stage}: {name} went elsewhere"
        for name, buffer in runner.engine.model.network.named_buffers():
            assert buffer.dtype == torch.float32, "the selection bias is never rounded"
            assert torch.allclose(buffer, wanted.states[FEW - 1][name, "master"], atol=1e-7)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("products", "stages"),
    [("native", (3,)), ("float32", (1,)), ("native", (1, 2)), ("float32", (2, 3))],
    ids=str,
)
def test_bfloat16_stays_close_to_float32(expected, products, stages):
    """Stage 2 keeps its gradients as stage 1 does."""
    run_distributed(check_bfloat16, 2, expected("sequence", FEW), products, stages, timeout=100)


@pytest.mark.parametrize(
    ("changed", "degree", "world", "said"),
    [
        ({}, 3, None, r"does not divide model\.num_experts=8.*Try parallel\.expert=2 \(any of \[1, 2, 4, 8\]"),
        ({"num_experts": 12}, 8, 8, r"Try parallel\.expert=4 \(any of \[1, 2, 4\]"),
        (
            {"num_experts": 0, "dense_layers": (), "selection_bias_rate": 0.0},
            2,
            None,
            r"no experts.*expert=1",
        ),
    ],
)
def test_degrees_that_do_not_divide_the_experts_are_refused(changed, degree, world, said):
    with pytest.raises(ConfigError, match=f"(?s){said}"):
        check_experts(replace(CONFIG, **changed), degree, world)
