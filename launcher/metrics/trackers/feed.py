"""The trainer's side of a tracker: records go through a bounded queue and a thread to the tracker's own process.

Nothing here waits for a tracker while a run goes on: where it is slower than the run its queue fills up, and further
records are dropped, which is said once. ``metrics.jsonl`` has them all.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from launcher.metrics.record import Record
from launcher.metrics.tensorboard import scalars
from launcher.metrics.trackers.start import without_secrets
from longctx.errors import ConfigError

log = logging.getLogger(__name__)

PACKAGES: dict[str, tuple[str, ...]] = {
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""What each tracker imports. MLflow keeps a run without a server in a database, for which it needs the other two."""
QUEUE_LINES = 1000
"""Records that wait for a tracker at most."""
DONE_SECONDS, STOP_SECONDS = 20.0, 2.0
"""How long the end of a run waits for its trackers; where a launcher may kill its ranks they go on by themselves."""

_REPOSITORY = Path(__file__).resolve().parents[3]


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError for a tracker that is not installed, or named twice. Rank 0 alone needs them."""
    if doubled := {name for name in names if list(names).count(name) > 1}:
        raise ConfigError(f"run.trackers names {' and '.join(sorted(doubled))} twice. Name each tracker once.")
    for name in names:
        needed = PACKAGES[name]
        if name == "mlflow" and os.environ.get("MLFLOW_TRACKING_URI"):
            needed = needed[:1]
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"run.trackers names {name}, but {' and '.join(missing)} is not installed where rank 0 runs.\n"
                f"Try `pip install -e '.[{name}]'`, or leave it out: metrics.jsonl and TensorBoard have the "
                "same numbers."
            )


def open_trackers(names: Sequence[str], folder: Path, project: str, config: Mapping[str, Any]) -> list[TrackerFeed]:
    """Start a feed for each tracker of a run, named after its folder; ``config`` may be nested."""
    start = {
        "folder": str(folder),
        "project": project,
        "name": folder.resolve().name,
        "config": {key: _plain(value) for key, value in _flat(config)},
    }
    feeds = []
    for name in names:
        log_file = folder / "logs" / f"tracker_{name}.log"
        log.info("Tracker %s: project %s, run %s; what it says is in %s.", name, project, start["name"], log_file)
        feeds.append(TrackerFeed(name, start, log_file))
    return feeds


def tracker_command(name: str) -> list[str]:
    """What starts a tracker's process."""
    return [sys.executable, "-m", "launcher.metrics.trackers.process", name, str(os.getpid())]


class TrackerFeed:
    """Feeds one tracker."""

    def __init__(self, name: str, start: Mapping[str, Any], log_file: Path, command: Sequence[str] = ()) -> None:
        """``start`` has the fields of ``Start``; what the tracker's process says goes to ``log_file``."""
        self._name, self._log_file = name, log_file
        self._command = list(command) or tracker_command(name)
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE_LINES)
        self._dropped, self._is_lost = 0, False
        self._process: subprocess.Popen[str] | None = None
        self._put(start)
        # A daemon: the end of a run does not wait for it either.
        self._thread = threading.Thread(target=self._feed, name=f"tracker {name}", daemon=True)
        self._thread.start()

    def send(self, record: Record) -> None:
        """Hand on a record's curves, and its sample text. Returns at once."""
        if values := scalars(record):
            when = datetime.fromisoformat(record["time"]).timestamp()
            self._put({"step": record["step"], "metrics": dict(map(_as_json, values)), "time": when})
        sample = record.get("sample")
        if sample:
            text = without_secrets(sample["prompt"] + sample["text"])
            self._put({"step": record["step"], "name": "sample", "text": text})

    def close(self, how: str) -> None:
        """Say how the run ended, and wait a little until all is sent."""
        self._put({"end": how})
        limit = STOP_SECONDS
        if how == "done":
            limit = DONE_SECONDS
        deadline = time.monotonic() + limit
        try:
            # The mark of the end must find room, where there is no hope for the rest.
            self._lines.put(None, timeout=limit)
        except queue.Full:
            self._lose("is stuck")
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._process is None or self._is_lost:
            self._kill()
            return
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
            if code:
                self._lose(f"has failed with exit code {code}")
        except subprocess.TimeoutExpired:
            if how == "done":
                log.warning("Tracker %s is still sending: it goes on for up to a minute.", self._name)

    def _put(self, line: Mapping[str, Any]) -> None:
        if self._is_lost:
            return
        try:
            self._lines.put_nowait(json.dumps(line))
        except queue.Full:
            self._dropped += 1
            if self._dropped == 1:
                log.warning(
                    "Tracker %s is slower than the run, or stuck: records are dropped there (said once). See %s; "
                    "metrics.jsonl has them all.",
                    self._name,
                    self._log_file,
                )

    def _feed(self) -> None:
        """Start the process and write to it, until the mark of the end comes. A thread of its own does it."""
        try:
            with self._log_file.open("a") as words:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.PIPE,
                    stdout=words,
                    stderr=words,
                    text=True,
                    # A group of its own: a terminal's Ctrl-C means the training.
                    process_group=0,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(_python_path())},
                )
            pipe = self._process.stdin
            assert pipe is not None
            with pipe:
                while (line := self._lines.get()) is not None:
                    pipe.write(line + "\n")
                    pipe.flush()
        except OSError as error:
            # A broken pipe: it has ended.
            if not isinstance(error, BrokenPipeError):
                self._lose(f"cannot be started: {error}")
            elif self._process is not None:
                self._lose(f"has failed with exit code {self._process.wait()}")

    def _lose(self, what: str) -> None:
        """Say once that a tracker is no more."""
        if not self._is_lost:
            self._is_lost = True
            log.warning(
                "Tracker %s %s: see %s. The run goes on without it; metrics.jsonl has every record.",
                self._name,
                what,
                self._log_file,
            )

    def _kill(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()


def _python_path() -> list[str]:
    """Where this process finds its modules, ours first: it may have been started from anywhere."""
    before = os.environ.get("PYTHONPATH")
    if before:
        return [str(_REPOSITORY), before]
    return [str(_REPOSITORY)]


def _as_json(pair: tuple[str, float]) -> tuple[str, float | str]:
    key, value = pair
    if math.isfinite(value):
        return key, value
    return key, str(value)


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    """Settings by dotted key."""
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def _plain(value: Any) -> str | int | float | bool:
    """A setting as every tracker takes it."""
    if isinstance(value, bool | int | float):
        return value
    return without_secrets(str(value))
