"""A tracker never stops, slows or outlives training: whatever its process does, the trainer goes on."""

from __future__ import annotations

import fcntl
import json
import logging
import math
import subprocess
import sys
import termios
import time
from pathlib import Path

import psutil
import pytest

from launcher.metrics.trackers import feed
from launcher.metrics.trackers.feed import PACKAGES, QUEUE_LINES, TrackerFeed, check_trackers, open_trackers
from launcher.metrics.trackers.process import follow, main, opener
from launcher.metrics.trackers.start import Start, without_secrets
from longctx.errors import ConfigError
from tests.helpers import REPOSITORY
from tests.launcher.metrics.test_metrics import TRAIN, VALIDATION, train

START = {"folder": "runs/a", "project": "p", "name": "a", "config": {}}
COPIES = "import sys; sys.stderr.write('hello'); open(sys.argv[1], 'w').write(sys.stdin.read())"
"""A tracker that writes what it is told to a file."""


def open_feed(folder: Path, *command: str) -> TrackerFeed:
    return TrackerFeed("wandb", START, folder / "words.log", [sys.executable, "-c", *command])


def test_a_tracker_is_told_curves_texts_and_the_end(tmp_path):
    tracker = open_feed(tmp_path, COPIES, str(tmp_path / "told"))
    tracker.send(train(1, loss=math.nan))
    tracker.send({**VALIDATION, "sample": {"prompt": "Once", "text": " upon"}})
    tracker.send({"kind": "event", "event": "resume", "step": 1, "time": TRAIN["time"]})
    tracker.close("done")
    start, step, validation, sample, end = [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]
    assert start == START
    assert (step["step"], step["metrics"]["train/loss"], step["metrics"]["train/lr"]) == (1, "nan", TRAIN["lr"])
    assert step["time"] == 1735689600.0
    assert validation["metrics"]["validation/loss"] == VALIDATION["loss"]
    assert sample == {"step": 12, "name": "sample", "text": "Once upon"}
    assert end == {"end": "done"}
    assert (tmp_path / "words.log").read_text() == "hello"


def bytes_in_pipe(tracker: TrackerFeed) -> int:
    """How many bytes stand in the pipe to a process that reads nothing."""
    if tracker._process is None or tracker._process.stdin is None:
        return 0
    return int.from_bytes(fcntl.ioctl(tracker._process.stdin, termios.FIONREAD, bytes(4)), sys.byteorder)


def test_a_tracker_that_hangs_costs_nothing_and_drops_records_which_is_said_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(feed, "DONE_SECONDS", 0.3)
    tracker = open_feed(tmp_path, "import time; time.sleep(600)")
    # Longer than any pipe: once a part of it is there, the thread never comes to another line. Without a bound the
    # queue would grow, without a queue this would hang.
    tracker._put({"text": "x" * 10_000_000})
    while not (tracker._lines.full() and bytes_in_pipe(tracker) > len(json.dumps(START)) + 1):
        tracker._put({"text": "y"})
    tracker.close("done")
    assert caplog.text.count("records are dropped") == 1
    assert caplog.text.count("is stuck") == 1
    process = tracker._process
    assert process is not None
    assert process.poll() is not None, "nobody is left behind"


def test_a_tracker_that_fails_is_named_once_and_the_run_goes_on(tmp_path, caplog):
    tracker = open_feed(tmp_path, "print('why'); raise SystemExit(3)")
    while not tracker._is_lost:
        tracker.send(train(1))
        time.sleep(0.01)
    for _ in range(2 * QUEUE_LINES):
        tracker.send(train(2))
    tracker.close("done")
    said = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert said == [
        f"Tracker wandb has failed with exit code 3: see {tmp_path / 'words.log'}. The run goes on without it; "
        "metrics.jsonl has every record."
    ]
    assert (tmp_path / "words.log").read_text() == "why\n"


def test_a_tracker_that_fails_at_its_end_is_named(tmp_path, caplog):
    tracker = open_feed(tmp_path, "import sys; sys.stdin.read(); raise SystemExit(1)")
    tracker.close("done")
    assert "has failed with exit code 1" in caplog.text


def test_what_cannot_be_started_is_named(tmp_path, caplog):
    tracker = TrackerFeed("wandb", START, tmp_path / "words.log", [str(tmp_path / "absent")])
    tracker.close("failed")
    assert "Tracker wandb cannot be started" in caplog.text


def test_a_stop_does_not_wait_for_a_tracker_that_still_sends(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(feed, "STOP_SECONDS", 0.1)
    waits = "import os, time\nwhile not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
    script = COPIES.replace("open", f"exec({waits!r}); open", 1)
    tracker = open_feed(tmp_path, script, str(tmp_path / "told"), str(tmp_path / "go"))
    while (process := tracker._process) is None:
        time.sleep(0.01)
    tracker.close("stopped")
    assert process.poll() is None
    (tmp_path / "go").touch()
    assert process.wait(60) == 0, "it goes on by itself"
    assert (tmp_path / "told").read_text().endswith('{"end": "stopped"}\n')
    assert not caplog.records


def test_a_tracker_that_hangs_does_not_outlive_its_trainer(tmp_path):
    waits = "from launcher.metrics.trackers.process import end_after_trainer; import sys, time; "
    waits += "end_after_trainer(int(sys.argv[1]), 0.1); print('ready', flush=True); time.sleep(600)"
    # A trainer that ends as soon as its tracker runs.
    starts = "import os, subprocess, sys; p = subprocess.Popen([sys.executable, '-c', sys.argv[1], str(os.getpid())], "
    starts += "stdout=subprocess.PIPE); p.stdout.readline(); print(p.pid, flush=True); os._exit(0)"
    done = subprocess.run(
        [sys.executable, "-c", starts, waits], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=60
    )
    deadline = time.monotonic() + 60
    while psutil.pid_exists(int(done.stdout)) and psutil.Process(int(done.stdout)).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline
        time.sleep(0.05)


class Told:
    """A tracker that remembers."""

    def __init__(self, start: Start) -> None:
        self.said: list[tuple] = [("start", start.folder, dict(start.config))]

    def metrics(self, step, values, seconds):
        self.said.append((step, values, seconds))

    def text(self, step, name, text):
        self.said.append((step, name, text))

    def finish(self, how):
        self.said.append(("finish", how))


@pytest.mark.parametrize(("lines", "how"), [([{"end": "stopped"}], "stopped"), ([], "failed")])
def test_the_process_hands_on_what_it_reads(lines, how):
    found: list[Told] = []

    def open_told(start: Start) -> Told:
        found.append(Told(start))
        return found[0]

    said = [
        {**START, "config": {"train.lr": 1.0}},
        {"step": 1, "metrics": {"a": 2, "b": "inf"}, "time": 5.0},
        {"step": 1, "name": "sample", "text": "x"},
    ]
    follow([json.dumps(line) for line in (*said, *lines)], open_told)
    assert found[0].said == [
        ("start", Path("runs/a"), {"train.lr": 1.0}),
        (1, {"a": 2.0, "b": math.inf}, 5.0),
        (1, "sample", "x"),
        ("finish", how),
    ]


def test_no_tracker_is_called_that():
    with pytest.raises(ValueError, match="comet"):
        opener("comet")
    assert main.__doc__


def test_what_is_kept_for_the_next_attempt(tmp_path):
    start = Start(folder=tmp_path, project="p", name="a", config={})
    assert start.remembered("wandb") == {}
    start.remember("wandb", {"id": "x"})
    assert start.remembered("wandb") == {"id": "x"}
    (tmp_path / "trackers" / "wandb.json").write_text("[")
    assert start.remembered("wandb") == {}


def test_secrets_are_left_out(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SOME_TOKEN", "true")
    text = "key 0123456789abcdef true at https://me:word@host:5000/x and s3://bucket/a@b"
    assert without_secrets(text) == "key *** true at https://***@host:5000/x and s3://bucket/a@b"


def test_settings_become_parameters(tmp_path, monkeypatch):
    (tmp_path / "logs").mkdir()
    monkeypatch.setattr(
        feed, "tracker_command", lambda name: [sys.executable, "-c", COPIES, str(tmp_path / f"{name}.txt")]
    )
    config = {"run": {"trackers": ("wandb",), "seed": 3}, "data": {"train": "s3://u:p@h/x", "balance": True}}
    for tracker in open_trackers(["wandb"], tmp_path, "mine", config):
        tracker.close("done")
    start = json.loads((tmp_path / "wandb.txt").read_text().splitlines()[0])
    assert start["config"] == {
        "run.trackers": "('wandb',)",
        "run.seed": 3,
        "data.train": "s3://***@h/x",
        "data.balance": True,
    }
    assert (start["project"], start["name"]) == ("mine", tmp_path.name)


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"pip install -e '.\[{name}\]'"):
        check_trackers([name])
    check_trackers([])


def test_mlflow_with_a_server_needs_no_database(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package == "mlflow" or None)
    with pytest.raises(ConfigError, match="but sqlalchemy and alembic is not installed"):
        check_trackers(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    check_trackers(["mlflow"])


def test_a_tracker_named_twice_is_refused():
    with pytest.raises(ConfigError, match="names trackio twice"):
        check_trackers(["trackio", "trackio"])
