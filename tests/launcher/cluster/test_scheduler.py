"""Tasks of srun and mpirun without ranks: refused, with a line that works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from launcher.cluster.scheduler import check_tasks
from launcher.pretrain import main
from longctx.errors import ClusterError
from tests.helpers import REPOSITORY
from tests.launcher.runs import flags, free_port
from tests.launcher.workers import rows

SRUN = {"SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_NUM_NODES": "2", "SLURM_PROCID": "3", "SLURM_NTASKS": "16"}
ARGUMENTS = ["--config", "my run.toml"]


def refused(environment: dict[str, str]) -> str:
    """What a task with this environment is told."""
    with pytest.raises(ClusterError) as caught:
        check_tasks("launcher", ARGUMENTS, environment)
    return str(caught.value)


def test_srun_without_ranks_gets_the_line_that_works(tmp_path, monkeypatch):
    environment = dict(SRUN)
    said = refused(environment)
    assert "srun started 8 tasks" in said
    assert (
        "srun --nodes 2 --ntasks 2 --ntasks-per-node 1 --cpu-bind none torchrun --nnodes 2 --nproc_per_node 4" in said
    )
    assert "launcher/pretrain.py --config 'my run.toml'" in said
    assert environment["RANK"] == "3", "the first task alone speaks"
    monkeypatch.chdir(tmp_path)  # an installed package has no such file
    assert "-m launcher.pretrain --config 'my run.toml'" in refused(dict(SRUN))
    monkeypatch.chdir(REPOSITORY)
    # A job of several tasks that runs the script once.
    said = refused({"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_PROCID": "0"})
    assert "--ntasks 1 --ntasks-per-node 1 --cpu-bind none torchrun --standalone --nproc_per_node 2 launcher/" in said


def test_the_script_asks_before_a_task_can_train_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "")  # gone again at the end, whatever the script sets
    monkeypatch.delenv("RANK")
    for name, value in SRUN.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ClusterError, match="srun started 8 tasks"):
        main(["--run.output_dir", str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "environment",
    [
        {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "1"},
        {"PMI_SIZE": "4", "PMI_RANK": "1"},
    ],
)
def test_mpirun_without_ranks(environment):
    said = refused(environment)
    assert "mpirun started 4 tasks" in said
    assert "torchrun --standalone --nproc_per_node 4 launcher/pretrain.py --config 'my run.toml'" in said
    assert environment["RANK"] == "1"


def test_what_is_not_refused():
    environment = {"RANK": "3", "LOCAL_RANK": "3", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
    check_tasks("launcher", ARGUMENTS, environment)
    assert "OMPI_COMM_WORLD_LOCAL_RANK" not in environment, "of a torchrun that mpirun started"
    check_tasks("launcher", [], {})
    check_tasks("launcher", [], {**SRUN, "RANK": "3", "WORLD_SIZE": "8"})
    check_tasks("none", [], dict(SRUN))
    check_tasks("launcher", [], {"SLURM_STEP_NUM_TASKS": "1", "SLURM_NTASKS": "16"})


def test_the_template_of_a_job_is_a_script():
    subprocess.run(["bash", "-n", REPOSITORY / "docs/clusters/slurm.sbatch"], check=True, timeout=10)


def with_programs(folder: Path, **scripts: str) -> dict[str, str]:
    """An environment whose PATH begins with these shell scripts."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    here = Path(sys.executable).parent
    free = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    return {**free, "PATH": f"{folder}:{here}:{os.environ['PATH']}", "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_the_line_that_is_offered_trains(shards, tmp_path):
    """A task as srun starts it is refused on one screen; the line it prints is then typed, with a stand-in for srun."""
    programs = tmp_path / "programs"
    programs.mkdir()
    # Takes srun's options away and runs the rest once: what it does on each of one node.
    srun = 'while [ "${1#--}" != "$1" ]; do shift 2; done; exec "$@"'
    environment = with_programs(programs, srun=srun)
    arguments = flags(shards, tmp_path / "run", {"train.steps": 2, "validation.rows": 0})
    task = {**environment, "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1", "SLURM_PROCID": "0"}
    refusal = subprocess.run(
        [sys.executable, "launcher/pretrain.py", *arguments],
        cwd=REPOSITORY, env=task, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert refusal.returncode == 1, refusal.stderr
    assert "Traceback" not in refusal.stderr
    line = re.search(r"^srun .*", refusal.stderr, re.M)
    assert line, refusal.stderr
    typed = subprocess.run(
        line[0], shell=True, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=200
    )
    assert typed.returncode == 0, typed.stderr
    assert [record["step"] for record in rows(tmp_path / "run")] == [1, 2]
    assert "2 ranks = " in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin")
def test_mpirun_starts_a_torchrun_on_each_node(shards, tmp_path):
    start = (
        'exec torchrun --nnodes 2 --node_rank "$OMPI_COMM_WORLD_RANK" --nproc_per_node 1 --master_addr 127.0.0.1 '
        f'--master_port {free_port()} launcher/pretrain.py "$@"'
    )
    environment = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    words = flags(shards, tmp_path / "run", {"train.stop_after": 2})
    subprocess.run(
        ["mpirun", "-np", "2", "--oversubscribe", "--bind-to", "none", "bash", "-c", start, "torchrun", *words],
        check=True,
        cwd=REPOSITORY,
        env=environment,
        timeout=150,
    )
    assert [row["step"] for row in rows(tmp_path / "run") if row["kind"] == "train"] == [1, 2]
