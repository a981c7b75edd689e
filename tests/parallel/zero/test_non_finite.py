"""Gradients that are not finite: every ZeRO stage says so on every rank and leaves weights and moments as they were."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from longctx.batch import IGNORED_TARGET
from longctx.config import ModelConfig
from longctx.errors import GradientError
from longctx.kernels.processor import MatmulMode
from longctx.model.experts.experts import is_expert_weight
from parallel.comm.world import gather_objects
from parallel.layout.sequence import SequenceLayout
from parallel.loss import count_step
from tests.helpers import on_ranks, run_distributed
from tests.parallel.experts.expert_cases import CONFIG, LENGTH, LR, ROWS, RanksRun, Spread, rows_of_step

DENSE = replace(CONFIG, num_experts=0, selection_bias=False, num_layers=2, dense_layers=())
Way = tuple[int, torch.dtype, MatmulMode]
WAYS: dict[str, list[Way]] = {
    "float32": [(stage, torch.float32, "native") for stage in range(4)],
    "bfloat16": [(stage, torch.bfloat16, "native") for stage in range(1, 4)],
    "bfloat16 in float32": [(stage, torch.bfloat16, "float32") for stage in range(1, 4)],
}
"""Every stage and dtype that DeepSpeed trains, and how bfloat16 is multiplied."""
ALL_WAYS = [way for ways in WAYS.values() for way in ways]


Values = dict[tuple[str, str, int], Tensor]


def held(runner: Spoilt) -> Values:
    """Masters, moments and buffers that this rank answers for, and the working weights of its forward."""
    values = {(r.name, r.role, r.start): r.values for r in runner.owned()}
    for name, p in runner.engine.model.network.named_parameters():
        part = p.ds_tensor if runner.spread.stage == 3 else p  # type: ignore[attr-defined]
        values[name, "working", 0] = part.detach().clone()
    for state in runner.engine.partition.inner.state.values():
        values["", "step", len(values)] = torch.as_tensor(state["step"]).clone()
    return values


def check_unchanged(runner: Spoilt, before: Values) -> None:
    after = held(runner)
    assert after.keys() == before.keys()
    changed = [key for key in before if not torch.equal(before[key], after[key])]
    assert not changed, f"{runner.spread}: {changed}"


def spoil(runner: Spoilt, wanted: Callable[[str], bool], rank: int, value: float) -> str:
    """From now on one rank's gradient of the first parameter that is wanted holds this value; returns its name."""
    name, p = next((n, p) for n, p in runner.engine.model.network.named_parameters() if wanted(n))

    def hook(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient.view(-1)[-1] = value
        return gradient

    if dist.get_rank() == rank:
        runner.hooks.append(p.register_hook(hook))
    return name


class Spoilt(RanksRun):
    """A run whose gradients can be spoilt for a step."""

    hooks: list[RemovableHandle]

    def __init__(self, config: ModelConfig, spread: Spread) -> None:
        super().__init__(config, spread)
        self.hooks = []

    def mend(self) -> None:
        for hook in self.hooks:
            hook.remove()
        self.hooks.clear()

    def refuse(self, number: int, accept: Callable[[float], bool]) -> GradientError:
        """Take a step whose norm is asked for."""
        step = self.engine.step
        with (
            mock.patch.object(self.engine, "step", lambda lr: step(lr, accept)),
            pytest.raises(GradientError) as caught,
        ):
            self.step(number)
        return caught.value


def check_refused(runner: Spoilt, step: int) -> GradientError:
    """The step is refused in the same words on every rank, and nothing that is kept of a run has changed."""
    before = held(runner)
    bias = [b.clone() for b in runner.engine.model.network.buffers()]
    with pytest.raises(GradientError) as caught:
        runner.step(step)
    check_unchanged(runner, before)
    assert all(torch.equal(a, b) for a, b in zip(bias, runner.engine.model.network.buffers(), strict=True))
    said = gather_objects(str(caught.value))
    assert len(set(said)) == 1, said
    return caught.value


def check_gradients(ways: list[Way], expert: int, value: float) -> None:
    last = dist.get_world_size() - 1
    for stage, dtype, products in ways:
        context = dist.get_world_size()
        spread = Spread(context=context, expert=expert, stage=stage, dtype=dtype, products=products)
        runner = Spoilt(CONFIG if expert > 1 else DENSE, spread)
        runner.step(0)
        name = spoil(runner, is_expert_weight if expert > 1 else lambda n: "layers.1" in n, last, value)
        error = check_refused(runner, 1)
        assert error.names == [name], f"{spread}: {error}"
        assert runner.engine.nonfinite_weights() == []


SPOILT = [(2, WAYS["float32"] + WAYS["bfloat16 in float32"], 1, torch.inf), (1, ALL_WAYS, 1, torch.nan)]
SPOILT += [(2, ALL_WAYS, 1, torch.nan), (2, ALL_WAYS, 2, torch.nan), (4, ALL_WAYS, 2, torch.inf)]
"""Ranks, ways, ranks that share the experts (one expert's gradient is spoilt, which some ranks hold), the value."""


@pytest.mark.parametrize(
    ("world_size", "ways", "expert", "value"),
    [(2, WAYS["bfloat16"], 1, torch.inf), *(pytest.param(*case, marks=pytest.mark.slow) for case in SPOILT)],
)
@pytest.mark.timeout(260)
def test_a_gradient_of_one_rank_that_is_not_finite_changes_nothing(world_size, ways, expert, value):
    run_distributed(check_gradients, world_size, ways, expert, value, timeout=240)


@pytest.mark.parametrize("stage", range(3))
@on_ranks(1)
def test_nor_do_finite_gradients_whose_norm_is_not(stage: int) -> None:
    """In stage 3 it is: DeepSpeed adds it up in float64 to the end, and the step is taken.

    Every gradient is finite, the sum of two squares is beyond float32.
    """
    runner = Spoilt(DENSE, Spread(stage=stage))
    runner.step(0)
    for layer in range(2):
        spoil(runner, lambda n, layer=layer: f"layers.{layer}" in n, 0, 1.5e19)
    assert check_refused(runner, 1).names == []


@pytest.mark.slow
@pytest.mark.parametrize("expert", [1, 2])
@pytest.mark.parametrize("ways", WAYS.values(), ids=WAYS)
@on_ranks(2, timeout=200)
def test_the_next_steps_are_as_if_it_had_never_been(ways: list[Way], expert: int) -> None:
    """Steps that were left out change nothing of those behind them: not one bit, however they were left out."""
    context = dist.get_world_size()
    for stage, dtype, products in ways:
        spread = Spread(context=context, expert=expert, stage=stage, dtype=dtype, products=products)
        config = CONFIG if expert > 1 else DENSE
        plain, runner = Spoilt(config, spread), Spoilt(config, spread)
        plain.step(0)
        plain.step(2)
        # Before the first update, when there are no moments yet; one spoilt by a rank; one whose norm is too large.
        assert runner.refuse(1, lambda norm: False).norm > 0
        runner.step(0)
        spoil(runner, lambda n: "layers.1" in n, context - 1, torch.nan)
        check_refused(runner, 1)
        runner.mend()
        refused = runner.refuse(1, lambda norm: norm < 0)
        assert (refused.names, len(set(gather_objects(refused.norm)))) == ([], 1)
        runner.step(2)
        assert plain.run.norms[-1] == runner.run.norms[-1], spread
        check_unchanged(runner, held(plain))


def check_weights(stages: list[int]) -> None:
    """A weight that one rank alone holds is found on all."""
    for stage in stages:
        runner = Spoilt(DENSE, Spread(context=dist.get_world_size(), stage=stage))
        name = "model.norm.weight"
        p = dict(runner.engine.model.network.named_parameters())[name]
        if stage == 3:
            if dist.get_rank() == 0:
                p.ds_tensor.data[0] = torch.nan  # type: ignore[attr-defined]
        else:
            p.data[0] = torch.nan
        assert runner.engine.nonfinite_weights() == [name]


def test_broken_weights_are_found_in_every_stage():
    run_distributed(check_weights, 2, list(range(4)))


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", range(4))
@on_ranks(2)
def test_a_step_without_targets_is_taken(stage: int) -> None:
    """A step of padding and unscored tokens: a loss and a gradient of exactly zero, and the step is taken."""
    runner = Spoilt(DENSE, Spread(context=dist.get_world_size(), stage=stage))
    runner.step(0)
    split = SequenceLayout.build("zigzag", LENGTH, runner.mesh.context)
    for n in range(ROWS):
        row = rows_of_step(1)[n]
        row = replace(row, targets=torch.full_like(row.targets, IGNORED_TARGET))
        mine = row.map_tokens(lambda x: split.split(x, runner.mesh.context_rank, 1))
        counts = count_step(runner.engine.model, [mine])
        loss = runner.engine.forward(mine)
        runner.engine.backward(runner.engine.model.loss(loss, counts))
        assert (counts["targets"], float(loss["nll"])) == (0, 0)
    assert runner.engine.step(LR) == 0.0
    assert not runner.engine.nonfinite_weights()
    runner.step(2)
    assert runner.run.norms[-1] > 0
