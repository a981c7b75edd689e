"""A message between ranks that goes wrong in a run: what the user reads, and that going on is as if it had not."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.training.hook import Step
from launcher.training.step import TrainStep
from launcher.training.totals import StepSums
from longctx.checkpoint_format import list_checkpoints
from parallel.comm.messages.kinds import Kind
from tests.faults import FaultRow, FaultRows, verdict
from tests.launcher.runs import STEPS
from tests.launcher.workers import end_guarded, rows, run, train
from tests.parallel.comm.messages import faults

pytestmark = pytest.mark.timeout(240)

RING = {"parallel.context": 2, "parallel.layout": "zigzag"}
TWO_LEVELS = {**RING, "parallel.context": 4, "parallel.transport": "two_level"}
LINEAR = {"model.layers": "linear", **RING}
BEFORE = 5
"""The step in which it goes wrong: a checkpoint of step 4 is there."""


class Fault(NamedTuple):
    """What is injected into one rank of a run."""

    inject: Callable[[faults.Seen], AbstractContextManager[None]]
    rank: int
    says: tuple[str, ...]
    """What the user reads."""
    changed: dict[str, Any] = RING
    ranks: int = 2


def exchanges(make: Callable[..., faults.Change], *args: Any, **options: Any) -> Callable[..., Any]:
    """A fault of exchanges from now on."""
    return lambda seen: faults.exchanges_changed(make(*args, 0, seen, **options))


def collective(name: str, call: int, bit: int) -> Callable[..., Any]:
    return lambda seen: faults.collective_spoilt(name, call, bit, seen)


FAULTS: dict[str, Fault] = {
    "wrong bytes in a hop": Fault(
        exchanges(faults.wrong_bytes, 77),
        1,
        ("Rank 1 got keys and values from rank 0 (forward of micro-batch 0, layer 0",),
    ),
    "a hop's tensors exchanged": Fault(
        exchanges(faults.reordered), 0, ("Rank 1 got keys and values from rank 0 (forward",)
    ),
    "a hop twice": Fault(
        exchanges(faults.stale, kind=Kind.KEYS), 0, ("Rank 1 got keys and values from rank 0", "in the same")
    ),
    "a stale gradient": Fault(
        exchanges(faults.stale, kind=Kind.GRADIENTS),
        1,
        ("Rank 0 got gradients of keys and values from rank 1 (backward", "in its place the bytes of another message"),
    ),
    "wrong bytes in two levels": Fault(
        exchanges(faults.wrong_bytes, 13), 3, ("Rank 3 got keys and values",), TWO_LEVELS, 4
    ),
    "wrong bytes in an all-gather": Fault(
        collective("all_gather_into_tensor", 1, -3),
        0,
        ("Rank 0 got keys and values of all ranks from rank 1 (forward",),
        {**RING, "parallel.transport": "all_gather"},
    ),
    "wrong bytes in heads": Fault(
        collective("all_to_all_single", 0, -3), 0, ("Rank 0 got heads (Ulysses) from rank 1",), {"parallel.ulysses": 2}
    ),
    "wrong bytes in tokens for experts": Fault(
        collective("all_to_all_single", 1, -3),
        0,
        ("Rank 0 got tokens for experts from rank 1 (forward of micro-batch 0, layer 0)",),
        {"parallel.expert": 2, "parallel.context": 1},
    ),
    "wrong bytes in states": Fault(
        collective("all_gather_into_tensor", 1, -3), 0, ("Rank 0 got states of linear attention from rank 1",), LINEAR
    ),
}


def injecting(fault: Fault, told: Path) -> Callable[[], AbstractContextManager[None]]:
    """The fault on its rank, and nothing on the others; when it came about is written down."""
    seen = faults.Seen()

    @contextlib.contextmanager
    def inject():
        if int(os.environ["RANK"]) != fault.rank:
            yield
            return
        with fault.inject(seen):
            yield
        if seen.at:
            told.write_text(str(time.time() - (time.perf_counter() - seen.at)))

    return inject


def disturbed_step(fault: Fault, told: Path) -> type[TrainStep]:
    """Steps of which the fifth has the fault."""
    inject = injecting(fault, told)

    class DisturbedStep(TrainStep):
        def forward_backward(self, step: Step) -> StepSums:
            if step.number != BEFORE:
                return super().forward_backward(step)
            with inject():
                return super().forward_backward(step)

    return DisturbedStep


def break_a_step(name: str, shards: Path, output: Path, **changed: Any) -> None:
    """A run in whose fifth step a message goes wrong: it ends, with one screen on rank 0."""
    fault = FAULTS[name]
    step = disturbed_step(fault, output.parent / f"{output.name}.at")
    words = (
        "ClusterError: in step 5, messages between ranks did not arrive as they were sent (parallel.check_rows).",
        "The step was not taken",
        "step_000004 (--run.resume latest)",
    )
    seen = output.parent / "screen"
    end_guarded(shards, output, {**fault.changed, **changed}, 1, [*fault.says, *words], step=step, seen=seen)


def check_fault(name: str, shards: Path, folder: Path, fault_rows: FaultRows) -> None:
    """The run ends in that step, and a run that goes on has the records of one that nothing befell."""
    fault, quiet, broken = FAULTS[name], folder / "quiet", folder / "broken"
    run(train, fault.ranks, shards, quiet, fault.changed)
    run(break_a_step, fault.ranks, name, shards, broken)
    seconds = time.time() - float((folder / "broken.at").read_text())
    assert [path.name for path in list_checkpoints(broken)] == ["step_000002", "step_000004"]
    assert [row["step"] for row in rows(broken) if row["kind"] == "train"] == [1, 2, 3, 4]
    run(train, fault.ranks, shards, broken, {**fault.changed, "run.resume": "latest"})
    fault_rows.add(
        FaultRow(
            group="ring",
            kind=name,
            injected=f"on rank {fault.rank} of {fault.ranks}, in step {BEFORE}",
            seen=verdict((folder / "screen").read_text(), fault.says[0]),
            seconds=seconds,
            steps_lost=0,
            beyond_checkpoint=0,
            equal=rows(broken) == rows(quiet),
        )
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_message_ends_the_run_which_goes_on_as_if_nothing_had_been(name, shards, tmp_path, fault_rows):
    check_fault(name, shards, tmp_path, fault_rows)


def test_wrong_bytes_in_a_hop_do_not_reach_the_weights(shards, tmp_path):
    """The quick one of all: the first step, no validation, no checkpoint."""
    run(spoil_first_step, 2, shards, tmp_path / "run")


def spoil_first_step(shards: Path, output: Path) -> None:
    from launcher.training.trainer import Trainer
    from longctx.errors import ClusterError
    from tests.launcher.workers import build

    trainer = Trainer(build(shards, output, {**RING, "validation.rows": 0}))
    trainer.take_step()
    before = {(r.name, r.role, r.start): r.values.clone() for r in trainer.run.engine.owned_ranges()}
    with injecting(FAULTS["wrong bytes in a hop"], output / "at")(), pytest.raises(ClusterError) as caught:
        trainer.take_step()
    assert "Rank 1 got keys and values from rank 0" in str(caught.value)
    assert "There is no checkpoint yet" in str(caught.value)
    after = {(r.name, r.role, r.start): r.values for r in trainer.run.engine.owned_ranges()}
    assert all(after[key].equal(before[key]) for key in before)


def without_the_check(name: str, shards: Path, output: Path) -> None:
    """The same fault where nobody looks: the run goes on to its end."""
    fault = FAULTS[name]
    step = disturbed_step(fault, output.parent / "at")
    train(shards, output, {**fault.changed, "parallel.check_rows": "off"}, step)


@pytest.mark.slow
def test_without_the_check_a_run_trains_on_with_other_numbers(shards, tmp_path):
    """What ``parallel.check_rows`` is for; and that it changes no number by itself."""
    run(train, 2, shards, tmp_path / "on", RING)
    run(train, 2, shards, tmp_path / "off", {**RING, "parallel.check_rows": "off"})
    assert rows(tmp_path / "on") == rows(tmp_path / "off")
    run(without_the_check, 2, "a stale gradient", shards, tmp_path / "spoilt")
    assert len(rows(tmp_path / "spoilt")) == len(rows(tmp_path / "on"))
    assert rows(tmp_path / "spoilt") != rows(tmp_path / "on")


def delay_a_hop(shards: Path, output: Path, seconds: float) -> None:
    """A hop of the fifth step begins late on rank 1; nobody compares messages."""
    from launcher.training.step import TrainStep

    seen = faults.Seen()

    class LateStep(TrainStep):
        def forward_backward(self, step):
            if step.number != BEFORE or self.run.mesh.rank != 1:
                return super().forward_backward(step)
            with faults.exchanges_changed(faults.delayed(seconds, 1, seen)):
                return super().forward_backward(step)

    train(shards, output, {**RING, "parallel.check_rows": "off"}, LateStep)


@pytest.mark.slow
def test_a_hop_that_is_late_changes_nothing(shards, tmp_path):
    run(train, 2, shards, tmp_path / "quiet", RING)
    run(delay_a_hop, 2, shards, tmp_path / "late", 3.0)
    assert rows(tmp_path / "quiet") == rows(tmp_path / "late")
    assert len([row for row in rows(tmp_path / "late") if row["kind"] == "train"]) == STEPS


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_clean_run_of_hundreds_of_steps_is_never_stopped(shards, tmp_path):
    """300 steps of packed rows over ring, Ulysses and experts, with validations between."""
    changed = {
        **{"parallel.context": 4, "parallel.ulysses": 2, "parallel.expert": 2, "parallel.layout": "balanced"},
        **{"train.steps": 300, "checkpoint.every_steps": 0, "validation.every_steps": 60},
    }
    from tests.helpers import run_distributed

    run_distributed(train, 4, shards, tmp_path / "run", changed, timeout=800.0)
    assert [row["step"] for row in rows(tmp_path / "run") if row["kind"] == "train"] == list(range(1, 301))
