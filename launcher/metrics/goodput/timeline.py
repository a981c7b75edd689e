"""``timeline.jsonl``: activities of a run's rank 0 and their seconds, one line each time an activity ends.

The file holds all attempts of a run, one after the other: a resume cuts ``metrics.jsonl``, but never this file. Within
an attempt, seconds come from a monotonic clock and count from the start of the process (``until``). Wall-clock times
matter only between attempts. ``docs/run-folder.md`` defines every key.
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

from longctx.untrusted.reading import parse_json

log = logging.getLogger(__name__)

TIMELINE_FILE = "timeline.jsonl"

Line = dict[str, Any]
"""One line of it."""
Doing = Literal["starting", "step", "validating", "saving"]
How = Literal["done", "stopped", "launcher", "failed"]
"""Why an attempt ended: at its last step, asked to stop, its launcher gone, or by an error."""

BEAT_SECONDS = 10.0
"""A line at least so often: of a process that is killed no other sign is left of how long it lived."""
_MOST = 1e11
"""Numbers of a timeline are smaller: seconds since 1970 are, and no NaN is."""
_SHIFT_SECONDS = 0.5
"""A time of day that moves by more against the steady clock has been set by somebody."""


class Timeline:
    """Writer of one attempt's timeline; only rank 0 has one."""

    def __init__(self, folder: Path, *, step: int, clock: Clock | None = None, beat_seconds: float = BEAT_SECONDS):
        """Begin the attempt, which goes on from ``step``; the time since the process started counts as "starting"."""
        self._clock, self._beat_seconds = clock or Clock(), beat_seconds
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._path = folder / TIMELINE_FILE
        age = self._clock.age()
        self._origin = self._clock.monotonic() - age
        self._began = self._clock.wall() - age
        self._doing: Doing = "starting"
        self._mark = 0.0
        self._written = 0.0
        self._file: TextIO | None = self._open()
        begin = {
            "event": "begin",
            "step": step,
            "time": round(self._began, 3),
            "since_boot": round(self._clock.since_boot() - age, 3),
            "boot": self._clock.boot_id(),
            "host": socket.gethostname(),
        }
        self._write(begin)
        self.did(self._now())
        self._thread = threading.Thread(target=self._beat, name="timeline", daemon=True)
        self._thread.start()

    def did(self, until: float | None = None) -> Line | None:
        """End the current activity and return to steps; return its line, or None if it was a step."""
        until = until or self._now()
        doing, self._doing = self._doing, "step"
        if doing == "step":
            # A step reports its own duration.
            return None
        line = self._line(doing, until - self._mark, until)
        self._mark = until
        return line

    def begin(self, doing: Doing) -> Line | None:
        """Begin an activity other than a step; return the line of the activity that it ends."""
        ended = self.did()
        self._doing, self._mark = doing, self._now()
        return ended

    def step(self, step: int, seconds: float, **more: Any) -> list[Line]:
        """Record a step that has just ended after ``seconds``; return the new lines."""
        until = self._now()
        # The activity before lasted until the step began.
        before = self.did(max(self._mark, until - seconds))
        line = self._line("step", seconds, until, step=step, **more)
        self._mark = until
        return [one for one in (before, line) if one is not None]

    def end(self, how: How) -> Line | None:
        """End the attempt; return the line of the last activity. Safe to call twice."""
        if self._closed.is_set():
            return None
        doing = self._doing
        line = self.did()
        self._closed.set()
        self._thread.join()
        self._write({"event": "end", "how": how, "in": doing, "until": round(self._now(), 4), **self._shift()})
        if self._file is not None:
            self._file.close()
        return line

    def _line(self, doing: Doing, seconds: float, until: float, **more: Any) -> Line:
        line = {"in": doing, "seconds": round(seconds, 4), "until": round(until, 4), **more, **self._shift()}
        self._write(line)
        return line

    def _now(self) -> float:
        return self._clock.monotonic() - self._origin

    def _shift(self) -> Line:
        """Return the wall clock's shift against the monotonic clock since the beginning; empty if it was not set."""
        shift = self._clock.wall() - self._began - self._now()
        if abs(shift) < _SHIFT_SECONDS:
            return {}
        return {"shift": round(shift, 3)}

    def _beat(self) -> None:
        """Report now and then, from a thread of its own, that the process is alive, with its current activity."""
        while not self._closed.wait(self._beat_seconds / 4):
            now = self._now()
            if now - self._written >= self._beat_seconds:
                self._write({"event": "alive", "in": self._doing, "until": round(now, 4), **self._shift()})

    def _open(self) -> TextIO | None:
        """Open the file at the beginning of a line."""
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
            self._give_up(error)
            return None

    def _write(self, line: Line) -> None:
        with self._lock:
            if self._file is None:
                return
            try:
                self._file.write(json.dumps(line) + "\n")
                # Flush, so that the lines survive if the process is killed.
                self._file.flush()
            except (OSError, ValueError) as error:
                self._file = None
                self._give_up(error)
            self._written = self._now()

    def _give_up(self, error: Exception) -> None:
        """Warn only: training does not depend on the timeline, and metrics, on the same disk, report the cause."""
        log.warning(
            "%s cannot be written: %s. The run's effective training time will lack this part.", self._path, error
        )


def read_timeline(folder: Path) -> Iterator[Line]:
    """Yield the lines of a run's timeline in order; none if the run kept no timeline.

    Malformed lines are skipped: a killed process leaves half a line.
    """
    try:
        file = (folder / TIMELINE_FILE).open("rb")
    except OSError:
        return
    with file:
        for text in file:
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict) and _is_sound(line):
                yield line


def _is_sound(line: Line) -> bool:
    """Return True if the line has the fields that its kind needs, as numbers that can be added."""
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
    """Return seconds since this process was started."""
    try:
        # Ticks since boot. psutil would add them to a boot time that is only known to a second.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, since_boot() - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return max(0.0, time.time() - psutil.Process().create_time())


def since_boot() -> float:
    """Return seconds since boot, including sleep; 0 if the system does not report them."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the id of the machine's current boot; empty if the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Sources of time; tests replace them."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds that never go back."""
    wall: Callable[[], float] = time.time
    """Seconds since 1970: anybody may set this clock while a run goes on."""
    since_boot: Callable[[], float] = since_boot
    boot_id: Callable[[], str] = boot_id
    age: Callable[[], float] = process_age
