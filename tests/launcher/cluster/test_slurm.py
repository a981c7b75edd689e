"""The template of a Slurm job, submitted to a real Slurm of two nodes."""

from __future__ import annotations

import shlex
import time
from pathlib import Path

import pytest

from launcher.metrics.record import read_metrics
from longctx.checkpoint_format import list_checkpoints
from tests.helpers import REPOSITORY
from tests.launcher.cluster.slurm import Slurm, slurm, why_no_slurm
from tests.launcher.faults.test_folders import NEXT_STEP, command
from tests.launcher.runs import flags
from tests.launcher.test_accidents import environment_of

TEMPLATE = REPOSITORY / "docs" / "clusters" / "slurm.sbatch"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(why_no_slurm() is not None, reason=str(why_no_slurm())),
]


def begin(cluster: Slurm, said: Path, words: list[str], *, minutes: int = 10) -> str:
    """Submit a job; returns its number. What it says goes to ``said``."""
    cluster.environment["RANKS_PER_NODE"] = "1"
    options = ["--parsable", "--time", str(minutes), "--output", str(said), "--chdir", str(REPOSITORY)]
    return cluster.run("sbatch", *options, str(TEMPLATE), *words, "--run.hostfile", "none").strip()


def submit(cluster: Slurm, said: Path, words: list[str], *, minutes: int = 10) -> str:
    """Run a job to its end; returns what it said."""
    cluster.wait(begin(cluster, said, words, minutes=minutes), 120)
    return said.read_text()


def test_a_job_trains_on_all_nodes_and_the_same_line_goes_on(shards, tmp_path):
    run = tmp_path / "run"
    with slurm(tmp_path / "slurm") as cluster:
        for steps in (4, 8):
            words = flags(shards, run, {"train.stop_after": steps})
            said = submit(cluster, tmp_path / f"job_{steps}.log", words)
            assert "2 ranks = data 1 × context 2" in said
            assert "Traceback" not in said
            assert list_checkpoints(run)[-1].name == f"step_{steps:06d}", said
    found = list(read_metrics(run))
    assert [record["step"] for record in found if record["kind"] == "train"] == list(range(1, 9))
    assert [record["step"] for record in found if record.get("event") == "resume"] == [4]


def test_a_run_saves_before_the_time_of_its_job_is_over(shards, tmp_path):
    run = tmp_path / "run"
    with slurm(tmp_path / "slurm") as cluster:
        cluster.environment["END_SECONDS"] = "25"
        changed = {"train.steps": 100_000, "checkpoint.every_steps": 0, "validation.rows": 0}
        said = submit(cluster, tmp_path / "job.log", flags(shards, run, changed), minutes=1)
    stops = [record for record in read_metrics(run) if record.get("event") == "stop"]
    assert len(stops) == 1, said
    (saved,) = list_checkpoints(run)
    assert saved.name == f"step_{stops[0]['step']:06d}"
    # Of the tasks, srun may cancel one that ends a little after the other.
    assert "DUE TO TIME LIMIT" not in said


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        # To the tasks of the job; the step under way takes longer than torchrun would wait by itself.
        ((), 33.0),
        # What `sbatch --signal USR1@120` does, and `--signal B:USR1@120`.
        (("--signal", "USR1"), 10.0),
        (("--batch", "--signal", "USR1"), 0.0),
    ],
)
def test_a_job_that_is_asked_to_end_saves(shards, tmp_path, words, seconds):
    run, said, go = tmp_path / "run", tmp_path / "job.log", tmp_path / "go"
    # Slurm's signals reach every process of a task, this one too.
    waits = command(NEXT_STEP, f"trap '' TERM USR1; while ! test -e {shlex.quote(str(go))}; do sleep 0.1; done")
    with slurm(tmp_path / "slurm") as cluster:
        cluster.environment.update(environment_of(waits, tmp_path / "waits"))
        job = begin(cluster, said, flags(shards, run, {"run.timeout_seconds": 120.0}))
        deadline = time.monotonic() + 120
        while not (tmp_path / "waits").exists():
            assert time.monotonic() < deadline, said.read_text()
            time.sleep(0.2)
        cluster.run("scancel", *words, job)
        time.sleep(seconds)
        go.touch()
        cluster.wait(job, 100)
    (stop,) = [record for record in read_metrics(run) if record.get("event") == "stop"]
    assert (stop["reason"], stop["step"]) == ("signal", 4), said.read_text()
    assert list_checkpoints(run)[-1].name == "step_000004", said.read_text()
    assert "Stopped after step 4 of 8" in said.read_text()
