"""A step that is not finite, or a spike, is left out on all ranks, and the run goes on as if it had never been."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from launcher.metrics.record import Record, read_metrics
from launcher.report.page import run_warnings
from launcher.report.report_run import load_run
from launcher.training import history
from launcher.training.hook import RunningStep
from launcher.training.run_state import Progress, TrainingRun
from launcher.training.totals import StepSums
from launcher.training.train_step import TrainStep
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader
from tests.faults import FaultRow, verdict
from tests.launcher.runs import STEPS
from tests.launcher.training.test_non_finite import EXPERT, LAST_NORM, ROUTER
from tests.launcher.workers import end_guarded_each, rows, run, train

pytestmark = pytest.mark.timeout(240)

LEFT_OUT = 5
"""The step; there are checkpoints after steps 4 and 6."""
EXPERTS = {"parallel.expert": 2, "model.selection_bias": True, "model.selection_bias_rate": 0.01}
KINDS = {
    "loss": (LAST_NORM, torch.nan),
    "router": (ROUTER, torch.nan),
    "gradient": (EXPERT, torch.inf),
    "spike": (EXPERT, 1e4),
}
"""What is spoilt on the last rank for one step: a weight by NaN, or a gradient by a factor."""
WHAT = {
    "loss": "NaN loss",
    "router": "NaN in a router",
    "gradient": "infinite gradient",
    "spike": "spike of a gradient",
}


def broken_while(run: TrainingRun, kind: str) -> Callable[[], None]:
    """Spoil something of the last rank's; returns what mends it."""
    name, value = KINDS[kind]
    p = dict(run.engine.model.network.named_parameters())[name]
    is_last = run.mesh.rank == run.mesh.world_size - 1
    if kind in ("gradient", "spike"):
        return p.register_hook(lambda gradient: gradient * value if is_last else gradient).remove
    # In stage 3, which shares weights, what every rank holds of it.
    held = [run.engine.partition.working_part(name, p), p.data]
    kept = [part.clone() for part in held]
    if is_last or run.engine.stage == 3:
        for part in held:
            part.fill_(value)

    def mend() -> None:
        for part, values in zip(held, kept, strict=True):
            part.copy_(values)

    return mend


class SpoiltStep(TrainStep):
    """One step is spoilt, from before its forward pass to behind its backward pass."""

    kind, steps = "loss", (LEFT_OUT,)

    def forward_backward(self, step: RunningStep) -> StepSums:
        mend: Callable[[], Any] = int
        if step.number in self.steps:
            mend = broken_while(self.run, self.kind)
        sums = super().forward_backward(step)
        mend()
        return sums


class WithoutStep(TrainStep):
    """What is to come of it: the step's rows are read, and nothing is done with them."""

    def __call__(self, progress: Progress) -> tuple[Progress, Record]:
        if progress.step + 1 != LEFT_OUT:
            return super().__call__(progress)
        self.run.prefetcher.next_step()
        left = Progress(step=LEFT_OUT, expert_load_LE=progress.expert_load_LE, history=progress.history.left_out())
        timings = {"step_seconds": 0.1, "max_memory_bytes": 0, "data_wait_seconds": 0.0}
        return left, {"kind": "train", "step": LEFT_OUT, "loss": math.nan, **timings}


def state(folder: Path, step: int = STEPS) -> dict[tuple[str, str], Tensor]:
    reader = CheckpointReader(folder / CHECKPOINTS / f"step_{step:06d}")
    return {
        (name, role): reader.read(name, role)
        for name in reader.names()
        for role in reader.manifest["tensors"][name]["roles"]
    }


def check_equal(one: Path, other: Path) -> None:
    found, wanted = state(one), state(other)
    assert found.keys() == wanted.keys()
    assert not [key for key in wanted if not torch.equal(found[key], wanted[key])]


def train_spoilt(kind: str, stage: int, shards: Path, output: Path) -> None:
    # A tiny run is no run of hundreds of steps.
    history.LEAST = 3
    changed = {**EXPERTS, "zero.stage": stage, "train.spike_sigmas": 50.0}
    spoilt = type("Spoilt", (SpoiltStep,), {"kind": kind})
    train(shards, output / "spoilt", changed, spoilt)
    train(shards, output / "without", changed, WithoutStep)


def resume(stage: int, shards: Path, output: Path) -> None:
    history.LEAST = 3
    changed = {**EXPERTS, "zero.stage": stage, "train.spike_sigmas": 50.0, "run.resume": "latest"}
    train(shards, output, changed)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("kind", KINDS)
def test_the_run_goes_on_as_if_it_had_none(shards, tmp_path, fault_rows, kind, stage):
    run(train_spoilt, 2, kind, stage, shards, tmp_path)
    found = [row for row in rows(tmp_path / "spoilt") if row["kind"] == "train"]
    assert [row["step"] for row in found if "skipped" in row] == [LEFT_OUT]
    left_out = found[LEFT_OUT - 1]
    assert left_out["skipped"] == kind
    if kind != "router":  # whose logits may or may not spoil the loss
        assert math.isfinite(left_out["loss"]) == (kind != "loss")
    check_equal(tmp_path / "spoilt", tmp_path / "without")
    wanted = [row for row in rows(tmp_path / "without") if row["kind"] == "train"]
    assert [row for row in found if row is not left_out] == [row for row in wanted if row["step"] != LEFT_OUT]
    # From a checkpoint of two steps before it, and from one behind it, which has to remember it.
    kept = state(tmp_path / "spoilt")
    (tmp_path / "spoilt" / CHECKPOINTS / f"step_{STEPS:06d}").rename(tmp_path / "last")
    run(resume, 2, stage, shards, tmp_path / "spoilt")
    again = state(tmp_path / "spoilt")
    assert not [key for key in kept if not torch.equal(kept[key], again[key])]
    log = (tmp_path / "spoilt" / "logs" / "rank_0.log").read_text()
    fault_rows.add(
        FaultRow(
            group="numbers",
            kind=WHAT[kind],
            injected=f"on the last of 2 ranks in step {LEFT_OUT}; compared with a run that never took that step",
            seen=verdict(log, f"Step {LEFT_OUT} is skipped"),
            # It is said at the end of the step.
            seconds=next(r["step_seconds"] for r in read_metrics(tmp_path / "spoilt") if r["step"] == LEFT_OUT),
            steps_lost=sum("skipped" in row for row in found),
            beyond_checkpoint=0,
            equal=[row for row in found if row is not left_out] == [row for row in wanted if row["step"] != LEFT_OUT],
        )
    )
    if kind != "loss":
        assert "1 step was skipped" in " ".join(run_warnings(load_run(tmp_path / "spoilt")))


def end_at_the_second(shards: Path, output: Path) -> None:
    words = ["the gradient in step 6 is not finite", "1 step before it", "train.skip_steps=1", "step_000004 ("]
    spoilt = type("Spoilt", (SpoiltStep,), {"kind": "gradient", "steps": (LEFT_OUT, LEFT_OUT + 1)})
    end_guarded_each(shards, output, [({"parallel.expert": 2, "train.skip_steps": 1}, 1, words)], spoilt)


def test_too_many_in_a_row_end_it(shards, tmp_path):
    run(end_at_the_second, 2, shards, tmp_path)
    assert [row.get("skipped") for row in rows(tmp_path) if row["kind"] == "train"][LEFT_OUT - 1 :] == [
        "gradient",
        None,
    ]
    # Each rank's log has it, and the console that of rank 0 alone: there may be thousands of ranks.
    for rank, level in ((0, "WARNING"), (1, "INFO")):
        log = (tmp_path / f"logs/rank_{rank}.log").read_text()
        warning = f"Step {LEFT_OUT} is skipped, number 1 in a row of the 1 that"
        assert f"{level} launcher.training.hooks.skip_bad_steps: {warning}" in log
        assert EXPERT in log
