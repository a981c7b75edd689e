"""What is not finite (loss, router logits, gradient) ends the run: nothing is changed, on all ranks, on one screen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.config.config_sections import TrainSection
from launcher.metrics.record import Record
from launcher.report.page import run_warnings
from launcher.report.report_run import load_run
from launcher.training.hooks.skip_bad_steps import SkippedStep
from launcher.training.run_state import TrainingRun
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import TrainingError
from parallel.comm.world import gather_objects
from tests.launcher.runs import SCREEN, STEPS
from tests.launcher.workers import breaking_step, build, end_guarded_each, rows, run, train

pytestmark = pytest.mark.timeout(240)

EXPERT = "model.layers.1.mlp.experts.down_proj"
LAST_NORM = "model.norm.weight"
ROUTER = "model.layers.1.mlp.gate.weight"


def break_a_weight(run: TrainingRun, name: str = LAST_NORM) -> None:
    """A weight is no number any more in the forward of the last rank, or of all in stage 3, which shares it."""
    engine, mesh = run.engine, run.mesh
    p = dict(engine.model.network.named_parameters())[name]
    if engine.stage == 3 or mesh.rank == mesh.world_size - 1:
        # In stage 3 what a rank holds, and what it may have gathered of a small weight.
        for held in (engine.partition.working_part(name, p), p.data):
            held.fill_(torch.nan)


def break_a_router(run: TrainingRun) -> None:
    break_a_weight(run, ROUTER)


def break_a_gradient(run: TrainingRun) -> None:
    """The last rank's gradient of its experts is infinite from now on; the loss stays as it is."""

    def hook(gradient: Tensor) -> Tensor:
        return torch.full_like(gradient, torch.inf)

    p = dict(run.engine.model.network.named_parameters())[EXPERT]
    if run.mesh.rank == run.mesh.world_size - 1:
        p.register_hook(hook)


BREAKS: dict[str, tuple[Callable[[TrainingRun], None], list[str]]] = {
    "loss": (
        break_a_weight,
        ["the loss in step 3 is not finite: nan", f"before this step: {LAST_NORM}.", "no checkpoint"],
    ),
    "router": (
        break_a_router,
        ["router logits in step 3 are not finite: model.layers.1 (", f"before this step: {ROUTER}.", "z_loss_weight"],
    ),
    "gradient": (
        break_a_gradient,
        ["the gradient in step 3 is not finite: norm inf, though loss ", f"gradients: {EXPERT}."],
    ),
}


def test_a_step_in_which_no_token_counts_has_no_loss_to_speak_of():
    broken = SkippedStep(
        step=3, loss=None, grad_norm=math.inf, routers=(), gradients=(), weights=(), spike="", rejection="", ranks=(),
        in_row=0, rows="", train=TrainSection(), checkpoint=None,
    )  # fmt: skip
    assert "norm inf, though the step has no target tokens." in broken.message()
    part = replace(broken, grad_norm=None)
    assert "an objective term in step 3 is not finite" in part.message()
    assert part.error().record["loss"] is None


def kept(run: TrainingRun) -> dict[tuple[str, str, int], Tensor]:
    return {(r.name, r.role, r.start): r.values.clone() for r in run.engine.owned_ranges()}


def bits(values: Tensor) -> Tensor:
    """To compare also what is no number."""
    return values.view(torch.int32)


def break_each(shards: Path, output: Path, changed: dict[str, Any], kinds: list[str]) -> None:
    for kind in kinds:
        trainer = Trainer(build(shards, output / kind, {"train.skip_steps": 0, **changed}))
        trainer.take_step()
        trainer.take_step()
        act, words = BREAKS[kind]
        act(trainer.run)
        before = kept(trainer.run)
        with pytest.raises(TrainingError) as caught:
            trainer.take_step()
        after = kept(trainer.run)
        assert trainer.progress.step == 2
        changed_bits = [key for key in before if not torch.equal(bits(before[key]), bits(after[key]))]
        assert not changed_bits, "masters, moments and bias"
        said, record = str(caught.value), caught.value.record
        assert len(set(gather_objects(said))) == 1, "the same on every rank"
        assert all(word in said for word in words), said
        assert "model.layers.0" not in said, "the layer that is right"
        assert "--row 4)" in said, "the first of its two rows"
        assert len(said.splitlines()) < SCREEN
        check_record(record, kind)


def check_record(record: Any, kind: str) -> None:
    assert (record["kind"], record["step"]) == ("train", 3)
    assert math.isfinite(record["loss"]) == (kind == "gradient")
    assert record["grad_norm"] == (math.inf if kind == "gradient" else None)


BIAS = {"model.selection_bias": True, "model.selection_bias_rate": 0.01}


@pytest.mark.parametrize("stage", [0, *(pytest.param(stage, marks=pytest.mark.slow) for stage in (1, 2, 3))])
def test_it_is_said_before_anything_is_changed(shards, tmp_path, stage):
    changed = {**BIAS, "zero.stage": stage, "parallel.expert": 2}
    run(break_each, 2, shards, tmp_path, changed, list(BREAKS))


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_so_it_is_on_one_rank(shards, tmp_path, stage):
    changed = {**BIAS, "zero.stage": stage, "parallel.context": 1}
    run(break_each, 1, shards, tmp_path, changed, list(BREAKS))


# To the end of a run, and on from there.


def end_with(kind: str, shards: Path, output: Path) -> None:
    act, _ = BREAKS[kind]
    words = [
        "TrainingError: ",
        "in step 6",
        "step_000004 (--run.resume latest)",
        "The update was not applied",
    ]
    changed = {"parallel.expert": 2, "train.skip_steps": 0}
    end_guarded_each(shards, output, [(changed, 1, words)], breaking_step(6, act))


def trained(folder: Path) -> list[Record]:
    return [row for row in rows(folder) if row["kind"] == "train"]


@pytest.mark.parametrize("kind", ["loss", *(pytest.param(k, marks=pytest.mark.slow) for k in ("router", "gradient"))])
def test_the_run_ends_and_goes_on_from_its_newest_checkpoint(shards, tmp_path, kind):
    folder = tmp_path / "run"
    run(end_with, 2, kind, shards, folder)
    assert [path.name for path in list_checkpoints(folder)] == ["step_000002", "step_000004"]
    assert [row["step"] for row in trained(folder)] == [1, 2, 3, 4, 5, 6]
    last = trained(folder)[-1]
    assert math.isfinite(last["loss"]) == (kind == "gradient")
    if kind == "loss":
        assert "The loss was not finite in 1 step" in " ".join(run_warnings(load_run(folder)))
    run(train, 2, shards, folder, {"parallel.expert": 2, "run.resume": "latest"})
    assert [row["step"] for row in trained(folder)] == list(range(1, STEPS + 1))
    assert all(math.isfinite(row["loss"]) and math.isfinite(row["grad_norm"]) for row in trained(folder))
