"""A tracker never stops or delays training: whatever it does, the run goes on."""

from __future__ import annotations

import dataclasses
import logging
import math
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest

from launcher.metrics.trackers import tracker_threads
from launcher.metrics.trackers.tracker import TrackedRun, without_secrets
from launcher.metrics.trackers.tracker_threads import (
    PACKAGES,
    QUEUE_CALLS,
    Trackers,
    TrackerThread,
    check_trackers,
    open_trackers,
)
from longctx.errors import ConfigError
from tests.helpers import REPOSITORY
from tests.launcher.metrics.test_metrics import TRAIN, VALIDATION, train
from tests.launcher.runs import tiny_config


class Remembers:
    """A tracker that remembers its calls, and may refuse or hold up one of them."""

    def __init__(self, at: str = "", act: Callable[[], object] = lambda: None) -> None:
        self.calls: list[tuple] = []
        self._at, self._act = at, act

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        self._take("log", step, values, seconds)

    def text(self, step: int, name: str, text: str) -> None:
        self._take("text", step, name, text)

    def close(self, how: str) -> None:
        self._take("close", how)

    def _take(self, *call: object) -> None:
        self.calls.append(call)
        if call[0] == self._at:
            self._act()


def fail() -> None:
    raise OSError("no space at https://me:word@host")


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    """What a tracker that hangs waits for."""
    opened = threading.Event()
    yield opened
    opened.set()


def warnings(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("how", ["done", "stopped", "launcher", "failed"])
def test_a_tracker_gets_curves_texts_and_the_end(how, caplog):
    tracker = Remembers()
    trackers = Trackers([TrackerThread("x", lambda: tracker)])
    trackers.send({"kind": "event", "event": "resume", "step": 1, "time": TRAIN["time"]})
    trackers.send(train(1, loss=math.inf))
    trackers.send({**VALIDATION, "sample": {"prompt": "Once", "text": " upon"}})
    trackers.close(how)
    step, validation, sample, end = tracker.calls
    assert (step[0], step[1], step[3]) == ("log", 1, 1735689600.0)
    assert (step[2]["train/loss"], step[2]["train/lr"]) == (math.inf, TRAIN["lr"])
    assert validation[2]["validation/loss"] == VALIDATION["loss"]
    assert sample == ("text", 12, "sample", "Once upon")
    assert end == ("close", how)
    assert not caplog.records


def test_a_tracker_that_hangs_drops_records_and_delays_no_other_one(gate, caplog, monkeypatch):
    hangs, other = Remembers("log", gate.wait), Remembers()
    hanging = TrackerThread("hangs", lambda: hangs)
    trackers = Trackers([hanging, TrackerThread("other", lambda: other)])
    for step in range(10):
        trackers.send(train(step))
    # Past the other one, which may not keep up with this test.
    for step in range(10, QUEUE_CALLS + 12):
        hanging.put(lambda tracker, step=step: tracker.log(step, {}, 0.0))
    monkeypatch.setattr(tracker_threads, "DONE_SECONDS", 2.0)
    trackers.close("done")
    assert hanging.num_dropped in (11, 12), "one may be in its hands, the others are in the queue"
    assert [call[0] for call in other.calls] == ["log"] * 10 + ["close"]
    dropped, late = warnings(caplog)
    assert "its records are dropped" in dropped
    assert "hangs did not accept all records in time" in late
    # It was slow, after all.
    gate.set()
    hanging.join(60)
    hanging.wait(0.0)
    assert f"lacks {hanging.num_dropped} dropped records" in warnings(caplog)[-1]
    assert len(hangs.calls) == QUEUE_CALLS + 12 - hanging.num_dropped + 1


@pytest.mark.parametrize("how", ["stopped", "launcher", "failed"])
def test_a_run_that_stops_waits_less_than_one_that_is_done(how, gate, caplog, monkeypatch):
    """Whoever asked it to may soon kill it."""
    monkeypatch.setattr(tracker_threads, "STOP_SECONDS", 0.05)
    monkeypatch.setattr(tracker_threads, "DONE_SECONDS", math.inf)
    hanging = TrackerThread("x", lambda: Remembers("log", gate.wait))
    trackers = Trackers([hanging])
    trackers.send(train(1))
    trackers.close(how)
    assert hanging.is_alive()
    assert "x did not accept all records in time" in caplog.text


@pytest.mark.parametrize("at", ["log", "text", "close"])
def test_a_tracker_that_fails_is_closed_and_named_once(at, caplog):
    tracker = Remembers(at, fail)
    trackers = Trackers([TrackerThread("x", lambda: tracker)])
    for step in range(1, 20):
        trackers.send({**train(step), "sample": {"prompt": "", "text": "x"}})
    trackers.close("done")
    assert warnings(caplog) == [
        "Tracker x failed: OSError: no space at https://***@host. The run continues without it; "
        "metrics.jsonl has every record."
    ]
    assert tracker.calls[-1] == ("close", "failed")


def test_a_tracker_that_cannot_be_opened_is_named_and_takes_no_room(caplog):
    def refuse() -> Remembers:
        raise ModuleNotFoundError("No module named 'x'")

    one = TrackerThread("x", refuse)
    trackers = Trackers([one])
    for step in range(2 * QUEUE_CALLS):
        trackers.send(train(step))
    trackers.close("failed")
    assert caplog.text.count("Tracker x failed: ModuleNotFoundError: No module named 'x'") == 1
    assert not one.is_alive()


@pytest.mark.slow
def test_a_done_process_does_not_wait_for_a_tracker_that_hangs():
    """Libraries wait for their own work when Python exits; this one for ever."""
    script = """
import atexit, threading
from launcher.cluster.exit import run_script
from launcher.metrics.trackers import tracker_threads
from tests.launcher.metrics.test_metrics import train
from tests.launcher.metrics.trackers.test_tracker_threads import Remembers

tracker_threads.DONE_SECONDS = 0.1
def main():
    never = threading.Event()
    atexit.register(never.wait)
    trackers = tracker_threads.Trackers([tracker_threads.TrackerThread("x", lambda: Remembers("log", never.wait))])
    trackers.send(train(1))
    trackers.close("done")
run_script(main)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, timeout=60, check=False)
    assert done.returncode == 0


def test_secrets_are_left_out(monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SOME_TOKEN", "true")
    text = "key 0123456789abcdef true at https://me:word@host:5000/x and s3://bucket/a@b"
    assert without_secrets(text) == "key *** true at https://***@host:5000/x and s3://bucket/a@b"


def test_settings_become_parameters(tmp_path, monkeypatch):
    opened: list[tuple[str, TrackedRun]] = []
    monkeypatch.setattr(tracker_threads, "open_tracker", lambda *call: opened.append(call) or Remembers())
    config = {"run": {"trackers": ("wandb",), "seed": 3}, "data": {"train": "s3://u:p@h/x", "balance": True}}
    trackers = open_trackers(["wandb"], tmp_path, project="mine", config=config, first_step=7)
    trackers.send(train(7))
    trackers.close("done")
    assert sorted(name for name, _ in opened) == ["tensorboard", "wandb"]
    assert opened[0][1] == TrackedRun(
        folder=tmp_path,
        project="mine",
        name=tmp_path.name,
        config={"run.trackers": "('wandb',)", "run.seed": 3, "data.train": "s3://***@h/x", "data.balance": True},
        first_step=7,
    )


def test_a_run_opens_the_trackers_that_it_names(tmp_path, monkeypatch):
    """On rank 0; their first step is 0, of a resumed run the one after its checkpoint."""
    from launcher.training import trainer  # torch and DeepSpeed, for which the process above need not wait
    from launcher.training.run_origin import RunOrigin

    asked: list[tuple] = []
    monkeypatch.setattr(trainer, "open_trackers", lambda *known, **more: asked.append((*known, more)))
    config = tiny_config(tmp_path, tmp_path, {"run.trackers": "wandb", "run.tracker_project": "mine"})
    for origin, is_rank_0 in (("new", True), ("resumed", True), ("resumed", False)):
        run = SimpleNamespace(config=config, folder=tmp_path, origin=RunOrigin(kind=origin), is_rank_0=is_rank_0)
        trainer._open_trackers(run, step=4)
    more = {"project": "mine", "config": dataclasses.asdict(config)}
    assert asked == [(("wandb",), tmp_path, {**more, "first_step": first_step}) for first_step in (0, 5)]


@pytest.mark.parametrize("name", PACKAGES)
def test_a_tracker_that_is_not_installed_is_refused_with_what_to_install(name, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"pip install 'longctx-train\[{name}\]'"):
        check_trackers([name])
    check_trackers([])
    with pytest.raises(ConfigError, match=f"names {name} twice"):
        check_trackers([name, name])


def test_mlflow_with_a_server_needs_no_database(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda package: package == "mlflow" or None)
    with pytest.raises(ConfigError, match="but sqlalchemy and alembic is not installed"):
        check_trackers(["mlflow"])
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://localhost:5000")
    check_trackers(["mlflow"])
