"""``timeline.jsonl``: rank 0's activities and their seconds, one line per finished activity.

The file holds all attempts of a run in order: a resume truncates ``metrics.jsonl``, but never this file. Within an
attempt, seconds come from a monotonic clock and count from process start (``until``). Wall-clock times matter only
between attempts. ``docs/run-folder.md`` defines every key.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TextIO

import psutil

from longctx.untrusted.strict_json import parse_json

log = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"

Line = dict[str, Any]
"""One line in the timeline."""
RunActivity = Literal["starting", "step", "validating", "saving"]
How = Literal["done", "stopped", "launcher", "failed"]
"""Reason for an attempt's end: last step, requested stop, launcher gone, or error."""

HEARTBEAT_SECONDS = 10.0
"""Longest interval between lines: a killed process leaves no other sign of its lifetime."""
_MOST = 1e11
"""Upper limit for timeline numbers: seconds since 1970 are smaller, and NaN fails the comparison."""
_SHIFT_SECONDS = 0.5
"""Minimum shift of wall time against the monotonic clock that counts as a clock change."""


class Timeline:
    """Writer for one attempt's timeline, on rank 0 only."""

    def __init__(
        self,
        folder: Path,
        *,
        step: int,
        clock: TimelineClock | None = None,
        heartbeat_seconds: float = HEARTBEAT_SECONDS,
    ):
        """Begin the attempt, which resumes from ``step``; the time since process start counts as "starting"."""
        self._clock, self._heartbeat_seconds = clock or TimelineClock(), heartbeat_seconds
        # The training loop and the heartbeat thread both write.
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._path = folder / TIMELINE_FILE
        # Measure from process start: imports are part of the attempt.
        age = self._clock.age()
        self._origin = self._clock.monotonic() - age
        self._start_time = self._clock.wall() - age
        self._activity: RunActivity = "starting"
        self._mark = 0.0
        self._written = 0.0
        self._file: TextIO | None = self._open()
        begin = {
            "event": "begin",
            "step": step,
            "time": round(self._start_time, 3),
            "since_boot": round(self._clock.uptime_seconds() - age, 3),
            "boot": self._clock.boot_id(),
            "host": socket.gethostname(),
        }
        self._write(begin)
        self.did(self._now())
        self._thread = threading.Thread(target=self._write_heartbeats, name="timeline", daemon=True)
        self._thread.start()

    def did(self, until: float | None = None) -> Line | None:
        """End the current activity and return to steps; return its line, or None for a step."""
        until = until or self._now()
        activity, self._activity = self._activity, "step"
        if activity == "step":
            # A step reports its own duration.
            return None
        line = self._line(activity, until - self._mark, until)
        self._mark = until
        return line

    def begin(self, activity: RunActivity) -> Line | None:
        """Begin an activity other than a step; return the line for the activity that ends."""
        previous_line = self.did()
        self._activity, self._mark = activity, self._now()
        return previous_line

    def step(self, step: int, seconds: float, **fields: Any) -> list[Line]:
        """Record a step that has just ended after ``seconds``; return the new lines."""
        until = self._now()
        # The previous activity lasted until the step began.
        before = self.did(max(self._mark, until - seconds))
        line = self._line("step", seconds, until, step=step, **fields)
        self._mark = until
        return [one for one in (before, line) if one is not None]

    def end(self, how: How) -> Line | None:
        """End the attempt; return the line for the last activity. Safe to call twice."""
        if self._closed.is_set():
            return None
        activity = self._activity
        line = self.did()
        # Stop the heartbeats first: "end" must be the last line.
        self._closed.set()
        self._thread.join()
        self._write({"event": "end", "how": how, "in": activity, "until": round(self._now(), 4), **self._shift()})
        if self._file is not None:
            self._file.close()
        return line

    def _line(self, activity: RunActivity, seconds: float, until: float, **fields: Any) -> Line:
        line = {"in": activity, "seconds": round(seconds, 4), "until": round(until, 4), **fields, **self._shift()}
        self._write(line)
        return line

    def _now(self) -> float:
        return self._clock.monotonic() - self._origin

    def _shift(self) -> Line:
        """Return the wall clock's shift against the monotonic clock since the start; empty if the clock was not set."""
        shift = self._clock.wall() - self._start_time - self._now()
        if abs(shift) < _SHIFT_SECONDS:
            return {}
        return {"shift": round(shift, 3)}

    def _write_heartbeats(self) -> None:
        """Write a heartbeat with the current activity, from a separate thread, after a long time without a line."""
        while not self._closed.wait(self._heartbeat_seconds / 4):
            now = self._now()
            if now - self._written >= self._heartbeat_seconds:
                self._write({"event": "alive", "in": self._activity, "until": round(now, 4), **self._shift()})

    def _open(self) -> TextIO | None:
        """Open the file for appending, at the start of a line."""
        try:
            text = self._path.open("a+b")
            with text:
                if text.tell():
                    text.seek(-1, 2)
                    # A killed process may have left half a line.
                    if text.read(1) != b"\n":
                        text.write(b"\n")
            return self._path.open("a", encoding="utf-8")
        except OSError as error:
            self._warn_unwritable(error)
            return None

    def _write(self, line: Line) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(line) + "\n")
                # Flush: lines must survive a kill.
                self._file.flush()
            except (OSError, ValueError) as error:
                self._file = None
                self._warn_unwritable(error)
            self._written = self._now()

    def _warn_unwritable(self, error: Exception) -> None:
        """Warn without failing: training does not depend on the timeline, and metrics report a failing disk."""
        log.warning(
            "%s cannot be written: %s. The run's effective training time will be incomplete.", self._path, error
        )


def read_timeline(folder: Path) -> Iterator[Line]:
    """Yield a run's timeline lines in order, without malformed ones; empty if the run kept no timeline."""
    try:
        file = (folder / TIMELINE_FILE).open("rb")
    except OSError:
        return
    with file:
        for text in file:
            try:
                line = parse_json(text)
            except ValueError:
                # A killed process leaves half a line.
                continue
            if isinstance(line, dict) and _is_sound(line):
                yield line


def _is_sound(line: Line) -> bool:
    """Return True if the line has the fields that its kind requires, as numbers that can be added."""
    needed: tuple[str, ...] = ("seconds", "until")
    if "event" in line:
        needed = {"begin": ("step", "time"), "alive": ("until",), "end": ("until",)}.get(line["event"], ("unknown",))
    elif line.get("in") == "step":
        needed = ("seconds", "until", "step")
    present = ("wait", "work", "shift", "since_boot")
    numbers: list[Any] = [line.get(key) for key in needed] + [line[key] for key in present if key in line]
    # type(), not isinstance(): in Python True is an int.
    return all(type(value) in (int, float) and abs(value) < _MOST for value in numbers)


def process_age() -> float:
    """Return seconds since process start."""
    try:
        # Ticks since boot are exact; psutil adds them to a boot time with a resolution of one second.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, uptime_seconds() - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return max(0.0, time.time() - psutil.Process().create_time())


def uptime_seconds() -> float:
    """Return seconds since boot, including sleep; 0 if the system does not report them."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the machine's current boot id; empty if unavailable."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class TimelineClock:
    """Clock functions; tests replace them."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds that never go back."""
    wall: Callable[[], float] = time.time
    """Seconds since 1970; this clock may be set during a run."""
    uptime_seconds: Callable[[], float] = uptime_seconds
    boot_id: Callable[[], str] = boot_id
    age: Callable[[], float] = process_age
