"""What stands beside a step: hooks are called in their order, see what is known by then, and may refuse the update."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch

from launcher.metrics.record import Record
from launcher.training.hook import RunningStep, StepHook
from launcher.training.hooks import step_hooks
from launcher.training.hooks.skip_bad_steps import SkipBadSteps
from launcher.training.step_prefetch import StepData
from launcher.training.train_step import TrainStep
from longctx.errors import TrainingError
from parallel.comm.world import gather_objects
from tests.launcher.workers import build, run

CONTEXT = {"parallel.context": 2, "validation.rows": 0}


class Noting(StepHook):
    """Notes what it is called for, and whether what it opens is closed."""

    def __init__(self, name: str, noted: list[str]) -> None:
        self.name, self.noted = name, noted

    def before_forward(self, step: RunningStep) -> None:
        self.noted.append(f"{self.name} before forward")
        step.scope.callback(lambda: self.noted.append(f"{self.name} closed"))
        step.extra_sums[self.name] = lambda device: torch.tensor([1.0, float(os.environ["RANK"])], device=device)

    def before_update(self, step: RunningStep) -> None:
        self.noted.append(f"{self.name} before update, {step.totals.summed[self.name].tolist()}")

    def after_update(self, step: RunningStep) -> None:
        self.noted.append(f"{self.name} after update, {step.skip_reason or 'taken'}")

    def before_log(self, step: RunningStep, record: Record) -> None:
        self.noted.append(f"{self.name} record")
        record[self.name] = step.number


class Refusing(StepHook):
    """Refuses one update."""

    def __init__(self, step: int) -> None:
        self.step = step

    def before_update(self, step: RunningStep) -> None:
        step.refuse("no reason", lambda norm: step.number == self.step)


class Ending(StepHook):
    """Ends the run on all ranks alike, before the update."""

    def before_update(self, step: RunningStep) -> None:
        raise TrainingError("no further")


def note_a_step(shards: Path, output: Path) -> None:
    run_, noted = build(shards, output, CONTEXT), []
    first, second = Noting("first", noted), Noting("second", noted)
    step = TrainStep(run_, [first, *step_hooks(run_), second])
    progress, record = step(run_.progress)
    assert noted == [
        "first before forward",
        "second before forward",
        "first before update, [2.0, 1.0]",
        "second before update, [2.0, 1.0]",
        "first after update, taken",
        "second after update, taken",
        "second closed",
        "first closed",
        "first record",
        "second record",
    ]
    assert (progress.step, record["first"], record["second"]) == (1, 1, 1)
    # What is raised ends the step, and what was opened is closed.
    noted.clear()
    with pytest.raises(TrainingError, match="no further"):
        TrainStep(run_, [first, Ending()])(progress)
    assert noted[-1] == "first closed"


def test_hooks_are_called_in_their_order_and_have_numbers_of_all_ranks(shards, tmp_path):
    run(note_a_step, 2, shards, tmp_path / "run")


def refuse_a_step(shards: Path, output: Path) -> None:
    run_ = build(shards, output, {**CONTEXT, "train.skip_steps": 3})
    step, progress = TrainStep(run_, [Refusing(2), *step_hooks(run_)]), run_.progress
    weights = run_.engine.model.network.model.embed_tokens.weight
    records = []
    for number in (1, 2, 3):
        before = weights.detach().clone()
        progress, record = step(progress)
        records.append(record)
        assert torch.equal(before, weights) == (number == 2)
    assert [record.get("skipped", "") for record in records] == ["", "no reason", ""]
    assert (progress.history.skipped, progress.history.in_row) == (1, 0)
    assert len(set(gather_objects(records[2]["loss"]))) == 1


def test_a_hook_may_refuse_an_update_on_all_ranks(shards, tmp_path):
    run(refuse_a_step, 2, shards, tmp_path / "run")


class Watching(StepHook):
    """Knows whether the data of steps is still held."""

    def __init__(self) -> None:
        self.data: list[weakref.ref[StepData]] = []

    def before_forward(self, step: RunningStep) -> None:
        self.data.append(weakref.ref(step.data))


def forget_steps(shards: Path, output: Path) -> None:
    run_, watching = build(shards, output, {**CONTEXT, "train.skip_steps": 3}), Watching()
    step, progress = TrainStep(run_, [*step_hooks(run_), watching]), run_.progress
    # Nothing may wait for a collection of garbage, which comes seldom. The feed keeps the last step's.
    gc.disable()
    for _ in range(3):
        progress, _ = step(progress)
    assert [data() is None for data in watching.data] == [True, True, False]
    # A step needs no hook.
    progress, record = TrainStep(run_, [])(progress)
    assert (progress.step, "skipped" in record) == (4, False)


def test_a_step_keeps_no_data_behind_it(shards, tmp_path):
    run(forget_steps, 2, shards, tmp_path / "run")


def list_hooks(shards: Path, output: Path) -> None:
    plain = {type(hook) for hook in step_hooks(build(shards, output / "plain", CONTEXT))}
    recording = {**CONTEXT, "train.record_routing": output / "routing", "parallel.check_rows": "off"}
    other = {type(hook) for hook in step_hooks(build(shards, output / "other", recording))}
    assert SkipBadSteps in plain & other
    assert {kind.__name__ for kind in plain - other} == {"MessageChecksums"}
    assert {kind.__name__ for kind in other - plain} == {"RoutingHook"}


def test_the_list_has_what_the_config_asks_for(shards, tmp_path):
    run(list_hooks, 2, shards, tmp_path)
