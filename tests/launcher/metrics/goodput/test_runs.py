"""Effective training time of real runs: killed, started again, asked to stop, gone on with a day later."""

from __future__ import annotations

import json
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest

from launcher.metrics.goodput.account import Goodput, read_goodput
from launcher.metrics.goodput.timeline import TIMELINE_FILE, read_timeline
from launcher.metrics.record import read_metrics
from launcher.report.page import write_report
from launcher.supervise.progress import newest_checkpoint_step
from tests.launcher.runs import STEPS, flags, supervised
from tests.launcher.stopping.stopped import LONG, disturbed, send
from tests.launcher.workers import run, train

LONGER = {"run.hostfile": "none", "train.steps": 60, "checkpoint.every_steps": 15, "validation.every_steps": 0}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def check_adds_up(folder: Path, wall: float) -> Goodput:
    """Every second has a kind, and there are as many as a clock outside has seen pass."""
    goodput = read_goodput(folder)
    seconds = goodput.seconds()
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds.values()) == pytest.approx(goodput.wall, abs=1e-6)
    # Outside one sees the launcher start before the first rank does, and the report be written behind the last step.
    assert goodput.wall <= wall
    last = datetime.fromisoformat(read_metrics(folder)[-1]["time"]).timestamp()
    assert goodput.wall >= last - goodput.attempts[0].start_time - 0.1
    return goodput


def train_seconds(folder: Path) -> float:
    return sum(r["step_seconds"] for r in read_metrics(folder) if r["kind"] == "train")


def test_a_rank_is_killed_and_longctx_run_goes_on(shards, tmp_path):
    folder, began = tmp_path / "run", time.monotonic()
    launch = supervised(flags(shards, folder, LONGER), wait_seconds=2)

    def is_behind_a_checkpoint() -> bool:
        # So that steps are lost that had been taken.
        steps = [line["step"] for line in read_timeline(folder) if line.get("in") == "step"]
        return bool(steps) and steps[-1] >= (newest_checkpoint_step(folder) or STEPS * 100) + 3

    launch.wait_until(is_behind_a_checkpoint, timeout=120)
    launch.ranks()[0].send_signal(signal.SIGKILL)
    ended = launch.wait(200)
    assert ended.code == 0, ended.text
    goodput = check_adds_up(folder, time.monotonic() - began)
    first, second = goodput.attempts
    assert (first.how, second.how) == (None, "done")
    assert second.begin["step"] > 0
    seconds = goodput.seconds()
    assert first.seconds()["lost"] > 0
    # The wait, and the time that DeepSpeed takes to start.
    assert first.after is not None
    assert first.after[0] == "stopped"
    assert 2 < seconds["stopped"] < time.monotonic() - began
    assert 0 < seconds["productive"] <= train_seconds(folder)
    rows = [r for r in read_metrics(folder) if r["kind"] == "train"]
    assert rows[-1]["restarts"] == 1
    assert rows[-1]["goodput"] == pytest.approx(seconds["productive"] / goodput.wall, abs=0.25)
    page = write_report(folder).read_text()
    assert "<h2>Stalls and lost time</h2>" in page
    assert "after a failed attempt" in page


def test_a_stop_by_a_signal_and_a_resume_a_day_later(shards, tmp_path):
    folder, began = tmp_path / "run", time.monotonic()
    found = disturbed(shards, folder, send(signal.SIGUSR1, "rank_1"))
    assert found.stop is not None
    run(train, 2, shards, folder, {**LONG, "run.resume": "latest"})
    goodput = check_adds_up(folder, time.monotonic() - began)
    assert [attempt.how for attempt in goodput.attempts] == ["stopped", "done"]
    assert goodput.seconds()["lost"] == 0, "a stop saves first"
    assert goodput.seconds()["stopped"] == 0
    share = goodput.seconds()["productive"] / (goodput.wall - goodput.seconds()["paused"])
    # As if it had all been a day earlier.
    lines = [json.loads(line) for line in (folder / TIMELINE_FILE).read_text().splitlines()]
    lines[0] |= {"time": lines[0]["time"] - 86400, "since_boot": lines[0]["since_boot"] - 86400}
    (folder / TIMELINE_FILE).write_text("".join(json.dumps(line) + "\n" for line in lines))
    later = read_goodput(folder)
    assert later.seconds()["paused"] == pytest.approx(goodput.seconds()["paused"] + 86400)
    assert later.seconds()["productive"] / (later.wall - later.seconds()["paused"]) == pytest.approx(share)
