"""``longctx run`` over the real command: a rank, a launcher and a host that go away cost nothing of the result."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path

import psutil
import pytest

from launcher.cluster.exit import STOPPED
from launcher.supervise.progress import last_step, newest_checkpoint_step
from longctx.checkpoint_format import list_checkpoints
from tests.launcher.cluster.cluster import HOSTS, missing_programs, two_hosts
from tests.launcher.runs import STEPS, Launch, flags, supervised
from tests.launcher.workers import rows, run, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
LIMIT = 240.0


def check_ended(launch: Launch, code: int) -> str:
    """What was said until the end, with this exit code; nobody is left."""
    ended = launch.wait(LIMIT)
    assert ended.code == code, ended.text
    assert not ended.orphans
    return ended.text


@pytest.mark.parametrize("victim", ["rank", "launcher", "runner"])
def test_whoever_is_killed_the_metrics_are_those_of_an_undisturbed_run(shards, tmp_path, victim):
    folder = tmp_path / "run"
    launch = supervised(flags(shards, folder, {"run.hostfile": "none"}))
    launch.wait_until(lambda: bool(list_checkpoints(folder)), timeout=LIMIT / 2)
    victims = {
        "rank": lambda: list(launch.ranks().values()),
        "launcher": launch.launchers,
        "runner": launch.runner().children,
    }[victim]()
    victims[-1].send_signal(signal.SIGKILL)
    text = check_ended(launch, 0)
    # Ranks train on without a launcher: they may have come to the end before anybody asked.
    assert "longctx run: attempt 1 ended" in text or victim != "rank"
    # With it DeepSpeed's launcher shows its last rank's number where another one has failed.
    assert "--local_rank" not in text
    assert newest_checkpoint_step(folder) == STEPS
    run(train, 2, shards, tmp_path / "undisturbed", {})
    assert rows(folder) == rows(tmp_path / "undisturbed"), "to the last bit"


@pytest.mark.parametrize("victim", ["rank", "command"])
def test_so_they_are_under_our_own_verb(shards, tmp_path, victim):
    """Nobody outlives the attempt that started it: two runs would write one folder."""
    folder = tmp_path / "run"
    words = [sys.executable, "-m", "launcher", "run", "--wait-seconds", "0", "--", sys.executable, "-m", "launcher"]
    launch = Launch([*flags(shards, folder), "--ranks", "2"], script="train", starter=words)
    launch.wait_until(lambda: bool(list_checkpoints(folder)), timeout=LIMIT / 2)
    ranks = [process for process in launch.family() if "launcher/pretrain.py" in " ".join(process.cmdline())]
    (command,) = launch.runner().children()
    {"rank": ranks[-1], "command": command}[victim].send_signal(signal.SIGKILL)
    text = check_ended(launch, 0)
    assert "longctx run: attempt 1 ended" in text or victim != "rank"
    assert newest_checkpoint_step(folder) == STEPS
    run(train, 2, shards, tmp_path / "undisturbed", {})
    assert rows(folder) == rows(tmp_path / "undisturbed"), "to the last bit"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stop_is_the_ranks_own_and_the_last_thing_said_is_ours(shards, tmp_path, number):
    """Ctrl-C in a terminal comes to ``longctx run`` alone. No launcher shows where it was, or ends the ranks."""
    folder = tmp_path / "run"
    settings = {"run.hostfile": "none", "train.steps": 40, "checkpoint.every_steps": 0, "run.resume": "auto"}
    launch = supervised(flags(shards, folder, settings))
    launch.wait_until(lambda: (last_step(folder) or 0) >= 3, timeout=LIMIT / 2)
    launch.runner().send_signal(number)
    text = check_ended(launch, STOPPED)
    assert "Traceback" not in text
    before, after = text.split("Stopped after step")
    assert "--run.resume auto" in after
    assert newest_checkpoint_step(folder) == last_step(folder)
    # DeepSpeed's launcher notes the exit codes of its ranks, a line each.
    others = [line for line in after.splitlines()[4:] if line.strip() and "[launch.py" not in line]
    assert not others, others
    assert "KeyboardInterrupt" not in before


def test_a_host_that_goes_away_is_left_out(shards, tmp_path):
    if reason := missing_programs():
        pytest.skip(reason)
    settings = {"parallel.context": 1, "train.tokens_per_step": 1024}
    folder, gone = tmp_path / "run", tmp_path / "gone"
    with two_hosts(tmp_path) as (hostfile, environment):
        # The second host's ssh ends like that of a machine without power, once there is a file.
        programs = tmp_path / "programs"
        programs.mkdir()
        ssh = programs / "ssh"
        is_gone = f'case "$*" in *{HOSTS[1]}*) test -e {gone} && exit 255;; esac'
        ssh.write_text(f'#!/bin/sh\n{is_gone}\nexec {shutil.which("ssh")} "$@"\n')
        ssh.chmod(0o755)
        path = f"{programs}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        starter = ["--hostfile", str(hostfile), "--no_ssh_check", "--master_addr", "127.0.0.1"]
        launch = supervised(flags(shards, folder, settings), starter, environment={**environment, "PATH": path})
        launch.wait_until(lambda: bool(list_checkpoints(folder)), timeout=LIMIT / 2)
        gone.touch()
        for process in psutil.process_iter(["cmdline", "environ"]):
            line, variables = process.info["cmdline"] or [], process.info["environ"] or {}
            if str(folder) in line and variables.get("RANK") == "1" and "launcher/pretrain.py" in line:
                process.send_signal(signal.SIGKILL)
        text = check_ended(launch, 0)
    assert f"{HOSTS[1]} does not answer over ssh. Continuing with 1 of 2 hosts, 1 ranks." in text
    run(train, 1, shards, tmp_path / "alone", settings)
    got, want = rows(folder), rows(tmp_path / "alone")
    assert [row["step"] for row in got] == [row["step"] for row in want]
    for one, other in zip(got, want, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5), "gradients were added in another order"
