"""A message between ranks that goes wrong in a run: what the user reads, and that going on is as if it had not."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from launcher.training.hook import RunningStep
from launcher.training.totals import StepSums
from launcher.training.train_step import TrainStep
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import ClusterError
from parallel.comm.messages.kinds import Kind
from tests.faults import FaultRow, verdict
from tests.helpers import run_distributed
from tests.launcher.workers import build, end_guarded, rows, run, train
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
        ("Rank 0 got KV gradients from rank 1 (backward", "its bytes are those from another message"),
    ),
    "wrong bytes in two levels": Fault(
        exchanges(faults.wrong_bytes, 13), 3, ("Rank 3 got keys and values",), TWO_LEVELS, 4
    ),
    "wrong bytes in an all-gather": Fault(
        collective("all_gather_into_tensor", 1, -3),
        0,
        ("Rank 0 got all ranks' keys and values from rank 1 (forward",),
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
        collective("all_gather_into_tensor", 1, -3), 0, ("Rank 0 got linear attention states from rank 1",), LINEAR
    ),
}


@contextlib.contextmanager
def injected(fault: Fault, told: Path) -> Iterator[None]:
    """The fault on its rank, and nothing on the others; when it came about is written down."""
    if int(os.environ["RANK"]) != fault.rank:
        yield
        return
    seen = faults.Seen()
    with fault.inject(seen):
        yield
    if seen.at:
        told.write_text(str(time.time() - (time.perf_counter() - seen.at)))


def break_a_step(name: str, shards: Path, output: Path) -> None:
    """A run in whose fifth step a message goes wrong: it ends, with one screen on rank 0."""
    fault = FAULTS[name]
    told = output.parent / f"{output.name}.at"

    class DisturbedStep(TrainStep):
        def forward_backward(self, step: RunningStep) -> StepSums:
            if step.number != BEFORE:
                return super().forward_backward(step)
            with injected(fault, told):
                return super().forward_backward(step)

    words = (
        "ClusterError: in step 5, messages between ranks changed in transit (parallel.check_rows).",
        "The update was not applied",
        "step_000004 (--run.resume latest)",
    )
    seen = output.parent / "screen"
    end_guarded(shards, output, fault.changed, 1, [*fault.says, *words], step=DisturbedStep, seen=seen)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_wrong_message_ends_the_run_which_goes_on_as_if_nothing_had_been(name, shards, tmp_path, fault_rows):
    fault, quiet, broken = FAULTS[name], tmp_path / "quiet", tmp_path / "broken"
    run(train, fault.ranks, shards, quiet, fault.changed)
    run(break_a_step, fault.ranks, name, shards, broken)
    seconds = time.time() - float((tmp_path / "broken.at").read_text())
    assert [path.name for path in list_checkpoints(broken)] == ["step_000002", "step_000004"]
    assert [row["step"] for row in rows(broken) if row["kind"] == "train"] == [1, 2, 3, 4]
    run(train, fault.ranks, shards, broken, {**fault.changed, "run.resume": "latest"})
    fault_rows.add(
        FaultRow(
            group="ring",
            kind=name,
            injected=f"on rank {fault.rank} of {fault.ranks}, in step {BEFORE}",
            seen=verdict((tmp_path / "screen").read_text(), fault.says[0]),
            seconds=seconds,
            steps_lost=0,
            beyond_checkpoint=0,
            equal=rows(broken) == rows(quiet),
        )
    )


def test_wrong_bytes_in_a_hop_do_not_reach_the_weights(shards, tmp_path):
    """The quick one of all: the first step, no validation, no checkpoint."""
    run(spoil_first_step, 2, shards, tmp_path / "run")


def spoil_first_step(shards: Path, output: Path) -> None:
    trainer = Trainer(build(shards, output, {**RING, "validation.rows": 0}))
    trainer.take_step()
    before = {(r.name, r.role, r.start): r.values.clone() for r in trainer.run.engine.owned_ranges()}
    with injected(FAULTS["wrong bytes in a hop"], output / "at"), pytest.raises(ClusterError) as caught:
        trainer.take_step()
    assert "Rank 1 got keys and values from rank 0" in str(caught.value)
    assert "There is no checkpoint yet" in str(caught.value)
    after = {(r.name, r.role, r.start): r.values for r in trainer.run.engine.owned_ranges()}
    assert all(after[key].equal(before[key]) for key in before)


@pytest.mark.slow
def test_the_check_changes_no_number(shards, tmp_path):
    run(train, 2, shards, tmp_path / "on", RING)
    run(train, 2, shards, tmp_path / "off", {**RING, "parallel.check_rows": "off"})
    assert rows(tmp_path / "on") == rows(tmp_path / "off")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_clean_run_of_hundreds_of_steps_is_never_stopped(shards, tmp_path):
    """300 steps of packed rows over ring, Ulysses and experts, with validations between."""
    changed = {
        **{"parallel.context": 4, "parallel.ulysses": 2, "parallel.expert": 2, "parallel.layout": "balanced"},
        **{"train.steps": 300, "checkpoint.every_steps": 0, "validation.every_steps": 60},
    }
    run_distributed(train, 4, shards, tmp_path / "run", changed, timeout=800.0)
    assert [row["step"] for row in rows(tmp_path / "run") if row["kind"] == "train"] == list(range(1, 301))
