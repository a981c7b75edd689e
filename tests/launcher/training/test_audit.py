"""A wrong number in one rank's computation ends the run, with that rank's name; a right one never does."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.flips import Flip, looked_at
from launcher.metrics.record import AUDIT_EVENT, Record, read_metrics
from launcher.supervise.host_selection import suspected_ranks
from launcher.training.hook import RunningStep
from launcher.training.hooks.audit import StepAudit
from launcher.training.run_state import Progress, TrainingRun
from launcher.training.totals import StepSums
from launcher.training.train_step import TrainStep
from longctx.checkpoint_format import CHECKPOINTS
from longctx.kernels.regions import missing_for_compiling
from tests.faults import FaultRow, verdict
from tests.helpers import run_distributed
from tests.launcher.workers import end_guarded, rows, run, train, train_each

pytestmark = pytest.mark.timeout(240)

WRONG = 4
"""A step whose products are audited."""
DENSE = {
    "run.audit_every": 1,
    "checkpoint.every_steps": 1,
    "model.num_experts": 0,
    "model.shared_ffn_size": 0,
    "model.ffn_size": 64,
}


def equal_runs(shards: Path, output: Path, changed: dict[str, Any]) -> None:
    runs = {output / str(every): {**changed, "run.audit_every": every} for every in (0, 1)}
    train_each(shards, runs)


CASES = {
    "context": {"zero.stage": 1},
    "experts": {"zero.stage": 3, "parallel.expert": 2},
    "bfloat16": {"zero.stage": 2, "train.dtype": "bfloat16", "train.tokens_per_step": 1024},
    "chunks": {"zero.stage": 1, "train.chunk_tokens": 32},
    "whole": {"zero.stage": 0, "parallel.context": 1},
    "offloaded": {"zero.stage": 2, "zero.offload": "cpu"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_an_audited_run_is_what_it_would_be_without(shards, tmp_path, case):
    run(equal_runs, 2, shards, tmp_path, CASES[case])
    with_audits, without = rows(tmp_path / "1"), rows(tmp_path / "0")
    kinds = {row.pop("audited") for row in with_audits if row["kind"] == "train"}
    assert len(kinds) > 1
    assert with_audits == without


@pytest.mark.slow
@pytest.mark.skipif(missing_for_compiling("cpu") is not None, reason="there is nothing to compile with")
@pytest.mark.timeout(900)
def test_an_audited_step_runs_the_same_compiled_code(shards, tmp_path):
    changed = {"train.compile": "on", "train.steps": 4, "validation.rows": 0, "parallel.context": 1}
    run_distributed(equal_runs, 1, shards, tmp_path, {**DENSE, **changed}, timeout=800)
    assert rows(tmp_path / "1") == [
        {**row, **audited} for row, audited in zip(rows(tmp_path / "0"), kinds_of(tmp_path / "1"), strict=True)
    ]


def kinds_of(folder: Path) -> list[Record]:
    return [{key: row[key] for key in row if key == "audited"} for row in rows(folder)]


class FlippedStep(TrainStep):
    """The last rank is wrong once, in a product of one step that is looked at."""

    def __init__(self, run: TrainingRun) -> None:
        super().__init__(run)
        self.flip = Flip()
        self.flip.bit = 11

    def forward_backward(self, step: RunningStep) -> StepSums:
        self.flip.seen, self.flip.is_counting = 0, True
        sums = super().forward_backward(step)
        self.flip.is_counting = False
        return sums

    def __call__(self, progress: Progress) -> tuple[Progress, Record]:
        audit = self.hook(StepAudit)
        if audit is not None and self.run.mesh.rank == self.run.mesh.world_size - 1:
            # Every step has as many products as the one before: the model is dense.
            chance = audit._audit._generator(progress.step + 1, self.run.mesh.rank)
            self.flip.call = (looked_at(chance, self.flip.seen) or [0])[-1]
            if progress.step + 1 != WRONG:
                self.flip.call = 0
            else:
                (self.run.folder.parent / "at").write_text(str(time.time()))
        with self.flip:
            return super().__call__(progress)


def end_named(shards: Path, output: Path, changed: dict[str, Any]) -> None:
    named = int(os.environ["WORLD_SIZE"]) - 1
    words = [f"rank {named} on {socket.gethostname()} computed a wrong number in step {WRONG}"]
    words += ["1 of ", "values differ, in bit 11 (mantissa)", "did not repeat", "model.layers."]
    words += [f"step_{WRONG - 1:06d} or an older one (--run.resume newest-good)", "from the hostfile"]
    end_guarded(shards, output, {**DENSE, **changed}, 1, words, step=FlippedStep, seen=output.parent / "screen")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_wrong_number_ends_the_run_and_names_the_rank(shards, tmp_path, fault_rows, stage, ranks):
    broken, quiet, changed = tmp_path / "broken", tmp_path / "quiet", {**DENSE, "zero.stage": stage}
    run(end_named, ranks, shards, broken, changed)
    seconds = time.time() - float((tmp_path / "at").read_text())
    events = [row for row in read_metrics(broken) if row.get("event") == AUDIT_EVENT]
    assert [suspected_ranks(event) for event in events] == [[ranks - 1]]
    assert events[0]["step"] == WRONG
    steps = [row["step"] for row in rows(broken) if row["kind"] == "train"]
    assert steps == list(range(1, WRONG)), "the step was not taken"
    assert not (broken / CHECKPOINTS / f"step_{WRONG:06d}").exists()
    run(train, ranks, shards, quiet, changed)
    run(train, ranks, shards, broken, {**changed, "run.resume": "newest-good"})
    fault_rows.add(
        FaultRow(
            group="numbers",
            kind="a flipped bit in a product's output",
            injected=f"bit 11 of 32, on rank {ranks - 1} of {ranks} in step {WRONG}; run.audit_every = 1",
            seen=verdict((tmp_path / "screen").read_text(), "computed a wrong number"),
            seconds=seconds,
            steps_lost=0,
            beyond_checkpoint=0,
            equal=rows(broken) == rows(quiet),
        )
    )
