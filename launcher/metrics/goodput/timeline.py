"""``timeline.jsonl``: what rank 0 of a run did, and for how many seconds: a line each time that something ends.

The file holds all attempts of a run, one after the other: a resume cuts ``metrics.jsonl``, and never this file. Within
an attempt seconds are those of a clock that never goes back, counted from the start of the process (``until``). Times
of day matter between attempts alone. ``docs/run-folder.md`` defines every key.
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
    """Writes the timeline of one attempt; rank 0 alone has one."""

    def __init__(self, folder: Path, *, step: int, clock: Clock | None = None, beat_seconds: float = BEAT_SECONDS):
        """The attempt goes on from ``step``, and has been starting up to now."""
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
        """What was under way has ended, and steps go on; returns its line, None where that was a step."""
        until = until or self._now()
        doing, self._doing = self._doing, "step"
        if doing == "step":
            # A step says itself how long it took.
            return None
        line = self._line(doing, until - self._mark, until)
        self._mark = until
        return line

    def begin(self, doing: Doing) -> Line | None:
        """Something other than a step begins; returns the line of what ends by that."""
        ended = self.did()
        self._doing, self._mark = doing, self._now()
        return ended

    def step(self, step: int, seconds: float, **more: Any) -> list[Line]:
        """A step has ended that took so long; returns the new lines."""
        until = self._now()
        # What was under way before lasted until the step began.
        before = self.did(max(self._mark, until - seconds))
        line = self._line("step", seconds, until, step=step, **more)
        self._mark = until
        return [one for one in (before, line) if one is not None]

    def end(self, how: How) -> Line | None:
        """The attempt ends; returns the line of what was under way. Safe to call twice."""
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
        """By how much the time of day has been set since the beginning; nothing where it has not."""
        shift = self._clock.wall() - self._began - self._now()
        if abs(shift) < _SHIFT_SECONDS:
            return {}
        return {"shift": round(shift, 3)}

    def _beat(self) -> None:
        """Say now and then that the process is alive, and what it is in. A thread of its own does it."""
        while not self._closed.wait(self._beat_seconds / 4):
            now = self._now()
            if now - self._written >= self._beat_seconds:
                self._write({"event": "alive", "in": self._doing, "until": round(now, 4), **self._shift()})

    def _open(self) -> TextIO | None:
        """The file, at the beginning of a line."""
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
                # A killed process keeps what it has said.
                self._file.flush()
            except (OSError, ValueError) as error:
                self._file = None
                self._give_up(error)
            self._written = self._now()

    def _give_up(self, error: Exception) -> None:
        """Training does not depend on it, and the metrics, on the same disk, say what is wrong."""
        log.warning(
            "%s cannot be written: %s. The run's effective training time will lack this part.", self._path, error
        )


def read_timeline(folder: Path) -> Iterator[Line]:
    """The lines of a run's timeline, in their order; none where the run has kept none.

    A line that is no line is passed over: a process that was killed leaves half of one.
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
    """Whether a line has what its kind needs, as numbers that can be added."""
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
    """Seconds since this process was started."""
    try:
        # Ticks since the machine's start. psutil adds them to a time of day that is known to a second.
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return max(0.0, since_boot() - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return max(0.0, time.time() - psutil.Process().create_time())


def since_boot() -> float:
    """Seconds since the machine's start, sleep included; 0 where the system does not say."""
    if not hasattr(time, "CLOCK_BOOTTIME"):
        return 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """What names the machine since its start; empty where the system has no such name."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Where times come from; a test has clocks of its own."""

    monotonic: Callable[[], float] = time.monotonic
    """Seconds that never go back."""
    wall: Callable[[], float] = time.time
    """Seconds since 1970: anybody may set this clock while a run goes on."""
    since_boot: Callable[[], float] = since_boot
    boot_id: Callable[[], str] = boot_id
    age: Callable[[], float] = process_age
