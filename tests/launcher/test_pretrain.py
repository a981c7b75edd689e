"""A run as its user meets it: the deepspeed command from start to end, and every way in which it may not start."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from launcher.config.load_config import config_from_values, load_run_config
from launcher.config.resolved import ResolvedConfig
from launcher.metrics.goodput.timeline import TIMELINE_FILE
from launcher.metrics.record import METRICS_FILE, read_metrics
from launcher.supervise.progress import last_step, newest_checkpoint_step
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader, list_checkpoints
from longctx.errors import ClusterError
from longctx.kernels.processor import has_native_bfloat16
from parallel.comm.process import start_process_group
from tests.faults import FaultRow, verdict
from tests.helpers import REPOSITORY
from tests.launcher.cli.calls import flip_a_byte
from tests.launcher.runs import STEPS, Ended, Launch, flags, pretrain, resolved
from tests.launcher.workers import end_guarded_each, rows, run, train

pytestmark = pytest.mark.timeout(240)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a folder but the logs, by relative path."""
    files = [p for p in folder.rglob("*") if p.is_file() and p.parent.name != "logs"]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


@pytest.fixture
def copied(finished: Ended, tmp_path: Path) -> Path:
    """A copy of the finished run to go on in."""
    return Path(shutil.copytree(finished.folder, tmp_path / "run"))


# From start to end.


def test_what_a_run_leaves_behind(finished, shards):
    folder = finished.folder
    names = {p.name for p in folder.iterdir()}
    wanted = {"config.toml", "environment.json", METRICS_FILE, "logs", CHECKPOINTS, "report.html", "tensorboard"}
    wanted |= {TIMELINE_FILE, "attempts"}
    assert names == wanted
    for name in ("config.toml", "environment.json"):
        assert (folder / "attempts" / "001" / name).read_bytes() == (folder / name).read_bytes()
    config = config_from_values(tomllib.loads((folder / "config.toml").read_text()))
    asked = resolved(load_run_config(flags(shards, folder)), native_bfloat16=has_native_bfloat16(), ranks=2)
    # What the machine decides is written as it was decided: on a CPU nothing is compiled.
    assert ResolvedConfig.of(config) == asked
    environment = json.loads((folder / "environment.json").read_text())
    assert (environment["world_size"], environment["context"], environment["data"]) == (2, 2, 1)
    assert "--data.train" in environment["command"]
    assert {"deepspeed", "torch", "tokenizers"} <= set(environment["packages"])
    assert environment["threads"] == 1
    assert re.fullmatch(r"[0-9a-f]{40}\+?", environment["commit"])
    assert "<html" in (folder / "report.html").read_text()
    log = (folder / "logs" / "rank_0.log").read_text()
    assert "Attention kernel for" in log, "which one, why, and what to install for a faster one"
    steps = range(2, STEPS + 1, 2)
    assert sorted(p.name for p in (folder / CHECKPOINTS).iterdir()) == [f"step_{n:06d}" for n in steps]
    assert all(CheckpointReader(p).verify() == [] for p in list_checkpoints(folder))
    assert not finished.orphans
    assert not (folder.parent / "asked").exists(), "a start on one machine needs no ssh"


def test_every_step_has_its_row(finished):
    records = read_metrics(finished.folder)
    train_rows = [r for r in records if r["kind"] == "train"]
    assert [r["step"] for r in train_rows] == list(range(1, STEPS + 1))
    assert [r["step"] for r in records if r["kind"] == "validation"] == [4, 8]
    keys = "loss balance_loss lr grad_norm tokens tokens_per_second step_seconds data_wait_seconds max_memory_bytes mfu"
    for row in train_rows:
        assert set(keys.split()) <= set(row)
        assert row["grad_norm"] > 0 < row["tokens_per_second"]
    tokens = [r["tokens"] for r in train_rows]
    shares = [b - a for a, b in zip([0, *tokens], tokens, strict=False)]
    assert all(0 < share <= 512 for share in shares)
    for row, share in zip(train_rows, shares, strict=True):
        assert [sum(layer) for layer in row["expert_load"]] == [2 * share] * 2, "each token visits two experts"
    losses = [r["loss"] for r in records if r["kind"] == "validation"]
    assert losses[1] < losses[0] < 6.3, "it learns"


@pytest.mark.slow
def test_going_on_to_more_steps(shards, copied, finished):
    changed = {"run.resume": "latest", "train.steps": STEPS + 2, "validation.rows": 0}
    run(train, 2, shards, copied, changed)
    assert rows(copied)[: len(rows(finished.folder))] == rows(finished.folder)
    assert [r["step"] for r in rows(copied)[len(rows(finished.folder)) :]] == [STEPS + 1, STEPS + 2]
    assert f"train.steps {STEPS} → {STEPS + 2}." in (copied / "logs" / "rank_0.log").read_text()
    assert [p.name for p in sorted((copied / "attempts").iterdir())] == ["001", "002"]
    before = contents(copied)
    run(train, 2, shards, copied, changed)
    after = contents(copied)
    assert after == before, "nothing is left to do, so nothing is written"


def test_a_lone_process_needs_no_launcher_no_held_out_documents_and_no_slow_imports(shards, tmp_path):
    bare = Path(shutil.copytree(shards, tmp_path / "bare", ignore=shutil.ignore_patterns("validation")))
    argv = flags(bare, tmp_path / "run", {"parallel.context": 1, "train.steps": 2})
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")}
    command = [sys.executable, "-X", "importtime", "launcher/pretrain.py", *argv]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    ended = subprocess.run(command, cwd=REPOSITORY, env=environment, text=True, timeout=100, **pipe)
    assert ended.returncode == 0, ended.stdout
    assert [(r["kind"], r["step"]) for r in rows(tmp_path / "run")] == [("train", 1), ("train", 2)]
    assert ended.stdout.count("holds no held-out documents") == 1
    assert "data.validation" in ended.stdout
    # One line for each import, among those of the log.
    before_the_first_step, _, after = ended.stdout.partition("step 1/2")
    imported = set(re.findall(r"^import time:.*\| +([\w.]+)$", before_the_first_step, re.M))
    assert {"torch", "deepspeed.runtime.engine"} <= imported
    slow = {"torch._dynamo", "sympy", "matplotlib", "tensorboard", "transformers", "scipy", "rich.live"}
    assert not slow & imported
    assert "matplotlib" in after, "the report comes at the end"


# A rank dies.


@pytest.mark.slow
def test_a_killed_rank_ends_the_launch_and_resuming_equals_never_stopping(shards, finished, fault_rows, tmp_path):
    """Quickly without the command: ``checkpoint/test_checkpoint.py`` and ``test_accidents.py``."""
    folder = tmp_path / "run"
    launch = Launch(flags(shards, folder))
    launch.wait_until(lambda: len(launch.ranks()) == 2)
    ranks = launch.ranks()
    launch.wait_until(lambda: bool(list_checkpoints(folder)))
    ranks[1].send_signal(signal.SIGKILL)
    killed = time.monotonic()
    ended = launch.wait()
    assert ended.code != 0
    seconds = time.monotonic() - killed
    assert seconds < 30
    # Whichever notices first: the watch of the other rank, or the command, which then ends that rank.
    noticed = ("died without a message", "exits with return code = -9")
    noticed = [words for words in noticed if words in ended.text]
    assert noticed, ended.text
    assert "Traceback" not in ended.text
    assert not ended.orphans
    assert len(rows(folder)) < len(rows(finished.folder)), "it was killed too late to show anything"
    taken, newest = last_step(folder) or 0, newest_checkpoint_step(folder) or 0
    run(train, 2, shards, folder, {"run.resume": "latest"})
    assert rows(folder) == rows(finished.folder), "to the last bit"
    resumed = [row["step"] for row in read_metrics(folder) if row.get("event") == "resume"][-1]
    fault_rows.add(
        FaultRow(
            group="process",
            kind="SIGKILL of a rank under deepspeed",
            injected="rank 1 of 2 is killed once there is a checkpoint",
            seen=verdict(ended.text, noticed[0], {folder: "RUN"}),
            seconds=round(seconds, 2),
            steps_lost=taken - resumed,
            beyond_checkpoint=newest - resumed,
            equal=rows(folder) == rows(finished.folder),
        )
    )


@pytest.mark.slow
def test_resuming_by_the_command_equals_never_stopping(shards, finished, copied):
    for checkpoint in list_checkpoints(copied)[1:]:
        shutil.rmtree(checkpoint)
    resumed = pretrain(flags(shards, copied, {"run.resume": "latest"}), hostfile="hostfile")
    assert resumed.code == 0, resumed.text
    assert rows(copied) == rows(finished.folder), "to the last bit"
    assert [p.name for p in list_checkpoints(copied)] == [p.name for p in list_checkpoints(finished.folder)]


# It does not start: by the deepspeed command.


@pytest.mark.slow
def test_a_missing_hostfile_does_not_silently_become_one_rank(shards, tmp_path):
    """That it is found in the command is read in ``cluster/test_hostfile.py``."""
    ended = pretrain(flags(shards, tmp_path / "run", {"parallel.context": 1}), hostfile=tmp_path / "missing")
    ended.check_one_screen(1, "missing does not exist", "longctx train --ranks N")
    assert not (tmp_path / "run").exists()


# It does not start: said by rank 0 alone, after all ranks have agreed.


@pytest.mark.slow
def test_what_cannot_run_ends_on_every_rank_with_one_screen(shards, copied, tmp_path):
    damaged = Path(shutil.copytree(shards, tmp_path / "damaged"))
    shard = damaged / "00000.arrow"
    flip_a_byte(shard)
    truncated = Path(shutil.copytree(shards, tmp_path / "truncated"))
    (truncated / "00000.arrow").write_bytes(b"")
    file = tmp_path / "file"
    file.write_text("")
    before = contents(copied)
    cases: list[tuple[dict[str, Any], int, list[str]]] = [
        ({"data.train": tmp_path / "nowhere"}, 1, ["DataError", "nowhere", "data build"]),
        ({"data.train": file}, 1, ["DataError", str(file)]),
        ({"data.train": damaged}, 1, [f"{shard} is damaged"]),
        ({"data.train": truncated}, 1, ["00000.arrow has 0 bytes"]),
        ({"data.validation": tmp_path / "nowhere"}, 1, ["DataError", str(tmp_path / "nowhere")]),
        ({"model.vocab_size": 500}, 2, ["model.vocab_size=500", "Try --model.vocab_size 512"]),
        ({"run.output_dir": file / "below"}, 2, ["cannot be written", "Not a directory"]),
        ({"run.output_dir": "/proc/below"}, 2, ["run.output_dir='/proc/below' cannot be written"]),
        ({"run.output_dir": tmp_path / ("n" * 300)}, 2, ["cannot be written", "File name too long"]),
        ({"run.output_dir": copied}, 2, ["already holds a run"]),
        ({"run.output_dir": copied, "run.resume": "latest", "run.seed": 1}, 1, ["seed=0", "this run has 1"]),
        (
            {"run.output_dir": copied, "run.resume": "latest", "data.seq_len": 128},
            1,
            ["seq_len=256", "this run has 128"],
        ),
        ({"run.resume": "latest"}, 1, ["holds no committed checkpoint"]),
        ({"run.resume": "step_2"}, 1, ["run.resume='step_2' is neither a checkpoint", "'newest-good', 'auto'"]),
    ]
    # Whoever has it would train.
    if find_spec("trackio") is None:
        cases.append(
            ({"run.trackers": "trackio"}, 2, ["trackio is not installed", "pip install 'longctx-train[trackio]'"])
        )
    run(end_guarded_each, 2, shards, tmp_path / "new", cases)
    assert contents(tmp_path / "new") == {}, "nothing but the log of the failure"
    assert contents(copied) == before


# The ranks do not meet.


def test_a_port_in_use_is_named(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}.items():
        monkeypatch.setenv(name, value)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        with pytest.raises(ClusterError) as caught:
            start_process_group(timeout_seconds=5)
    assert f"127.0.0.1:{port}" in str(caught.value)
    assert "--master_port" in str(caught.value)
    assert not dist.is_initialized()
