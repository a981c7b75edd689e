"""Non-blocking delivery of a run's records to its trackers.

Each tracker has a bounded queue and a thread, so a tracker that hangs delays neither a step nor another tracker. A full
queue drops records and counts them; an exception ends that tracker. ``metrics.jsonl`` has every record in any case.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from launcher.cluster.exit import BACKGROUND
from launcher.metrics.record import Record
from launcher.metrics.trackers.tracker import TrackedRun, Tracker, series, without_secrets
from longctx.errors import ConfigError

log = logging.getLogger(__name__)

ALWAYS = ("tensorboard",)
"""Trackers enabled in every run, in addition to ``run.trackers``."""
PACKAGES: dict[str, tuple[str, ...]] = {
    "wandb": ("wandb",),
    "trackio": ("trackio",),
    "mlflow": ("mlflow", "sqlalchemy", "alembic"),
}
"""Packages imported by each optional tracker; MLflow's database, used without a server, needs the other two."""
QUEUE_CALLS = 1000
"""Maximum queued calls per tracker."""
DONE_SECONDS, STOP_SECONDS = 20.0, 2.0
"""Maximum wait for all trackers together at the end of a run; a launcher may soon kill a run that stops or fails."""

Call = Callable[[Tracker], None]


def check_trackers(names: Sequence[str]) -> None:
    """Raise ConfigError if a tracker is not installed or named twice. Only rank 0 needs them."""
    if doubled := {name for name in names if list(names).count(name) > 1}:
        raise ConfigError(f"run.trackers names {' and '.join(sorted(doubled))} twice. Name each tracker once.")
    for name in names:
        needed = PACKAGES[name]
        if name == "mlflow" and os.environ.get("MLFLOW_TRACKING_URI"):
            needed = needed[:1]
        missing = [package for package in needed if importlib.util.find_spec(package) is None]
        if missing:
            raise ConfigError(
                f"run.trackers names {name}, but {' and '.join(missing)} is not installed on rank 0's host.\nTry `pip "
                f"install 'longctx-train[{name}]'`, or leave it out: metrics.jsonl and TensorBoard have the same "
                "metrics."
            )


def open_trackers(
    names: Sequence[str], folder: Path, *, project: str, config: Mapping[str, Any], first_step: int
) -> Trackers:
    """Start the threads for ``ALWAYS`` and ``names`` on the run in ``folder``; ``config`` may be nested."""
    run = TrackedRun(
        folder=folder,
        project=project,
        name=folder.resolve().name,
        config={key: _plain(value) for key, value in _flat(config)},
        first_step=first_step,
    )
    return Trackers([TrackerThread(name, partial(open_tracker, name, run)) for name in (*ALWAYS, *names)])


def open_tracker(name: str, run: TrackedRun) -> Tracker:
    """Import the adapter called ``name`` and open the run with it."""
    # Import on demand: most of these libraries are optional.
    if name == "tensorboard":
        from launcher.metrics.trackers.to_tensorboard import TensorBoardTracker

        return TensorBoardTracker(run)
    if name == "wandb":
        from launcher.metrics.trackers.to_wandb import WandbTracker

        return WandbTracker(run)
    if name == "trackio":
        from launcher.metrics.trackers.to_trackio import TrackioTracker

        return TrackioTracker(run)
    from launcher.metrics.trackers.to_mlflow import MlflowTracker

    return MlflowTracker(run)


class Trackers:
    """Trackers for one run; empty on ranks other than 0."""

    def __init__(self, threads: Sequence[TrackerThread] = ()) -> None:
        self._threads = threads
        for thread in threads:
            thread.start()

    def send(self, record: Record) -> None:
        """Queue a record's curves and sample text for every tracker; return at once."""
        step, values, sample = record["step"], series(record), record.get("sample")
        if values:
            seconds = datetime.fromisoformat(record["time"]).timestamp()
            self._put(lambda tracker: tracker.log(step, values, seconds))
        if sample:
            text = without_secrets(sample["prompt"] + sample["text"])
            self._put(lambda tracker: tracker.text(step, "sample", text))

    def close(self, how: str) -> None:
        """Close all trackers and wait for them up to a deadline; ``how`` is the run's outcome, such as "done"."""
        deadline = time.monotonic() + (DONE_SECONDS if how == "done" else STOP_SECONDS)
        # End all before waiting for any: they share one deadline.
        for thread in self._threads:
            thread.finish(how)
        for thread in self._threads:
            thread.wait(deadline)

    def _put(self, call: Call) -> None:
        for thread in self._threads:
            thread.put(call)


class TrackerThread(threading.Thread):
    """Thread that opens a tracker at the first queued call, then makes the calls in order."""

    def __init__(self, tracker: str, open_it: Callable[[], Tracker]) -> None:
        # A daemon thread, so that the process can end even if the tracker hangs.
        super().__init__(name=f"{BACKGROUND}{tracker}", daemon=True)
        self.num_dropped = 0
        self._title, self._open = tracker, open_it
        self._tracker: Tracker | None = None
        self._has_failed, self._how = False, "failed"
        self._calls: queue.Queue[Call | None] = queue.Queue(QUEUE_CALLS)
        self._is_ending = threading.Event()

    def put(self, call: Call) -> None:
        """Queue a call; drop it if the queue is full."""
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self.num_dropped += 1
            if self.num_dropped == 1:
                log.warning(
                    "Tracker %s hangs or is slower than the run: its records are dropped (reported once). "
                    "metrics.jsonl has them all.",
                    self._title,
                )

    def finish(self, how: str) -> None:
        """Let the thread end once its queue is empty."""
        self._how = how
        self._is_ending.set()
        # The sentinel wakes a thread that waits for a call; with a full queue the thread is not waiting.
        with suppress(queue.Full):
            self._calls.put_nowait(None)

    def wait(self, deadline: float) -> None:
        """Wait until the deadline for the thread to end; warn if the tracker lacks records."""
        self.join(max(0.0, deadline - time.monotonic()))
        if self.is_alive():
            # A run that fails in its first seconds may end before a tracker's library is imported.
            if self._tracker is None and self._how == "failed":
                return
            log.warning("Tracker %s did not accept all records in time; metrics.jsonl has them.", self._title)
        elif self.num_dropped and not self._has_failed:
            log.warning("Tracker %s lacks %d dropped records.", self._title, self.num_dropped)

    def run(self) -> None:
        """Make queued calls until the run has ended and the queue is empty, then close the tracker."""
        while not (self._is_ending.is_set() and self._calls.empty()):
            call = self._calls.get()
            if call is not None:
                self._call(call)
        if self._tracker is not None:
            self._call(lambda tracker: tracker.close(self._how))

    def _call(self, call: Call) -> None:
        """Make one call; after an error, close the tracker and drop further calls."""
        if self._has_failed:
            return
        try:
            if self._tracker is None:
                self._tracker = self._open()
            call(self._tracker)
        # Any exception: the libraries raise many kinds, and training must go on.
        except Exception as error:
            self._has_failed = True
            log.warning(
                "Tracker %s failed: %s. The run continues without it; metrics.jsonl has every record.",
                self._title,
                without_secrets(f"{type(error).__name__}: {error}"),
            )
            if self._tracker is not None:
                with suppress(Exception):
                    self._tracker.close("failed")


def _flat(config: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in config.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", value))
    return found


def _plain(value: Any) -> str | int | float | bool:
    """Convert a setting to a type that every tracker accepts."""
    if isinstance(value, bool | int | float):
        return value
    return without_secrets(str(value))
