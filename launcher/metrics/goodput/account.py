"""Account of a run's seconds: each belongs to one kind, over all attempts and the gaps between them.

Seconds within an attempt come from its monotonic clock, so they add up to the attempt's duration. The gap between two
attempts is the difference in time since boot if both ran on one machine, otherwise in wall-clock time, and at least 0:
hosts' clocks disagree.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np

from launcher.metrics.goodput.timeline import Line, read_timeline

InSteps = Literal["productive", "lost", "skipped", "stalled", "data", "warm_up"]
Kind = InSteps | Literal["starting", "saving", "validation", "other", "stopped", "paused"]
KINDS: dict[Kind, str] = {
    "productive": "steps that the current state includes",
    "lost": "steps that were repeated or never completed",
    "skipped": "steps whose update was skipped",
    "stalled": "time beyond a typical step",
    "data": "waiting for rows",
    "warm_up": "first steps, beyond a typical step: compilation",
    "starting": "from process start to its first step",
    "saving": "training waits for a checkpoint",
    "validation": "validations and sample texts",
    "other": "between steps: metrics, logs",
    "stopped": "after a failed attempt, until the next one",
    "paused": "after a requested stop, until the next attempt",
}
"""Every kind with its description, in display order."""
_ACTIVITY_KINDS: dict[str, Kind] = {"starting": "starting", "saving": "saving", "validating": "validation"}
_ON_PURPOSE = ("done", "stopped")
"""Requested ends."""

Seconds = dict[Kind, float]


WINDOW = 100
"""Window for the expected duration: the attempt's last steps."""
LEAST = 8
"""Minimum steps in the window before a step can count as stalled."""
STALL_RATIO = 2.0
"""A step is stalled if it takes more than this many times its expected duration …"""
STALL_SECONDS = 1.0
"""… and exceeds it by more than this: on a busy machine, short steps vary by more than a factor of two."""


class Median:
    """Running median over the last ``size`` values."""

    def __init__(self, size: int = WINDOW) -> None:
        self._size, self._values, self._sorted = size, deque[float](), list[float]()

    def __len__(self) -> int:
        return len(self._values)

    def add(self, value: float) -> None:
        """Add a value; drop the oldest if the window is full."""
        # The deque has the values by age, for eviction; the sorted list has the same values, for the median.
        self._values.append(value)
        insort(self._sorted, value)
        if len(self._values) > self._size:
            del self._sorted[bisect_left(self._sorted, self._values.popleft())]

    @property
    def value(self) -> float:
        """Median; 0 if empty."""
        if not self._sorted:
            return 0.0
        middle = len(self._sorted) // 2
        if len(self._sorted) % 2:
            return self._sorted[middle]
        return (self._sorted[middle - 1] + self._sorted[middle]) / 2


class ExpectedStep:
    """Expected duration of a step, from previous steps in the same attempt."""

    def __init__(self) -> None:
        self._seconds, self._rates = Median(), Median()
        self._first: tuple[float, float] | None = None
        self.warm_up = 0.0
        """Seconds by which the first step exceeds its expected duration: it compiles and touches all memory first.

        0 until a second step ends; final after eight further steps.
        """

    def see(self, seconds: float, work: float) -> float:
        """Add a step that computed ``work`` FLOPs (in any unit, 0 if unknown); return its stalled seconds."""
        if self._first is None:
            self._first = seconds, work
            return 0.0
        stalled = 0.0
        if len(self._seconds) >= LEAST:
            # Compare before adding this step: it must not raise its own expected duration.
            excess = seconds - self._expected(work)
            if excess > STALL_SECONDS and seconds > STALL_RATIO * (seconds - excess):
                stalled = excess
        is_final = len(self._seconds) >= LEAST
        self._seconds.add(seconds)
        if work > 0 and seconds > 0:
            self._rates.add(work / seconds)
        if not is_final:
            self.warm_up = max(0.0, self._first[0] - self._expected(self._first[1]))
        return stalled

    def _expected(self, work: float) -> float:
        """Return the median step duration or, if longer, the time for ``work`` at the median rate."""
        # A row with one long document needs many times more attention FLOPs than one with short documents: no stall.
        rate = self._rates.value
        if work > 0 and rate > 0:
            return max(self._seconds.value, work / rate)
        return self._seconds.value


class Tally:
    """Running totals over one attempt's timeline."""

    def __init__(self, until: float = 0.0) -> None:
        """Start counting at ``until``; another tally has the attempt's earlier seconds."""
        self.until, self.stalls, self.expected_step = until, 0, ExpectedStep()
        self._seconds: Seconds = dict.fromkeys(KINDS, 0.0)

    def add(self, line: Line) -> list[tuple[Kind, float]]:
        """Add a line; return the time since the previous line's end, split by kind."""
        # A monotonic clock never goes back, but the file may have been edited by hand.
        passed = max(0.0, line["until"] - self.until)
        seconds = min(max(0.0, line["seconds"]), passed)
        parts: list[tuple[Kind, float]] = [("other", passed - seconds)]
        if line["in"] == "step":
            parts += self._step(line, seconds)
        else:
            parts.append((_ACTIVITY_KINDS.get(line["in"], "other"), seconds))
        return self._count(parts)

    def end(self, until: float, kind: Kind) -> None:
        """Count the time from the last line to the attempt's end as ``kind``."""
        self._count([(kind, max(0.0, until - self.until))])

    def seconds(self) -> Seconds:
        """Return seconds by kind, as known so far."""
        found = dict(self._seconds)
        found["productive"] -= self.warm_up
        found["warm_up"] += self.warm_up
        return found

    @property
    def warm_up(self) -> float:
        """Unproductive seconds in the first completed step."""
        return self.expected_step.warm_up

    def _step(self, line: Line, seconds: float) -> list[tuple[Kind, float]]:
        # Count the full wait: it is near 0 if the data keeps up, and a run that always waits could be faster.
        waited = min(max(0.0, line.get("wait", 0.0)), seconds)
        computed = seconds - waited
        if line.get("skipped"):
            return [("data", waited), ("skipped", computed)]
        stalled = self.expected_step.see(computed, line.get("work", 0.0))
        self.stalls += stalled > 0
        return [("data", waited), ("productive", computed - stalled), ("stalled", stalled)]

    def _count(self, parts: list[tuple[Kind, float]]) -> list[tuple[Kind, float]]:
        for kind, seconds in parts:
            self._seconds[kind] += seconds
            self.until += seconds
        return parts


@dataclass
class Attempt:
    """One start of the run, with its outcome."""

    begin: Line
    tally: Tally = field(default_factory=Tally)
    how: str | None = None
    """Reason for the end; None if the attempt was killed or is still running."""
    shift: float = 0.0
    """Seconds by which the host's wall clock was set during the attempt."""
    after: tuple[Kind, float] | None = None
    """Kind and length of the gap to the next attempt; None for the last attempt."""
    alive: Line | None = None
    """Last heartbeat, if no activity has ended since."""
    redone: float = 0.0
    """Productive seconds in steps that later attempts repeat."""
    # Arrays with one value per completed step: a run may have millions.
    steps: array[int] = field(default_factory=lambda: array("q"))
    lengths: array[float] = field(default_factory=lambda: array("d"))

    def see(self, line: Line) -> None:
        """Process a line other than a "begin" event."""
        self.shift = line.get("shift", self.shift)
        if line.get("event") == "alive":
            self.alive = line
            return
        self.alive = None
        if line.get("event") == "end":
            self.how = line.get("how")
            kind = _kind_of_rest(line)
            if self.how != "failed" and kind == "lost":
                # The last step had been completed: no other step was running.
                kind = "other"
            self.tally.end(line["until"], kind)
            return
        for kind, seconds in self.tally.add(line):
            if kind == "productive":
                self.steps.append(line["step"])
                self.lengths.append(seconds)

    def close(self, redone_from: float) -> None:
        """Finish after the last line; later attempts have repeated the steps after ``redone_from``, or will."""
        if self.alive is not None:
            self.tally.end(self.alive["until"], _kind_of_rest(self.alive))
        steps, lengths = np.frombuffer(self.steps, dtype=np.int64), np.frombuffer(self.lengths)
        self.redone = float(lengths[steps > redone_from].sum())
        if self.redone and steps[0] > redone_from:
            # The first step's warm-up is already counted, so it is not part of the repeated time.
            self.redone -= self.tally.warm_up

    def seconds(self) -> Seconds:
        """Return seconds by kind, without the gap after the attempt."""
        found = self.tally.seconds()
        found["productive"] -= self.redone
        found["lost"] += self.redone
        return found

    @property
    def start_time(self) -> float:
        """Start time in seconds since 1970, by the host's clock."""
        return self.begin["time"]

    def gap_to(self, next_attempt: Attempt) -> float:
        """Return seconds from this attempt's end to the next one's start; negative if clocks disagree."""
        own_begin, next_begin = self.begin, next_attempt.begin
        if own_begin.get("boot") and own_begin.get("boot") == next_begin.get("boot") and own_begin.get("since_boot"):
            # Same boot of one machine: unlike the wall clock, time since boot cannot be set.
            gap = next_begin.get("since_boot", 0.0) - own_begin["since_boot"] - self.tally.until
            if gap >= 0:
                return gap
        return next_attempt.start_time - (self.start_time + self.tally.until + self.shift)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Account over all attempts of a run."""

    attempts: Sequence[Attempt]
    skewed: int = 0
    """Gaps with unknown length: by the clocks, the next attempt began before the previous one ended."""

    def seconds(self) -> Seconds:
        """Return seconds by kind; they sum to ``wall``."""
        found: Seconds = dict.fromkeys(KINDS, 0.0)
        for attempt in self.attempts:
            for kind, seconds in attempt.seconds().items():
                found[kind] += seconds
            if attempt.after is not None:
                found[attempt.after[0]] += attempt.after[1]
        return found

    @property
    def wall(self) -> float:
        """Seconds from the first attempt's start to the last attempt's last sign of life."""
        between = sum(attempt.after[1] for attempt in self.attempts if attempt.after is not None)
        return between + sum(attempt.tally.until for attempt in self.attempts)

    @property
    def stalls(self) -> int:
        """Stalled steps."""
        return sum(attempt.tally.stalls for attempt in self.attempts)


def effective_share(seconds: Seconds) -> float | None:
    """Return productive seconds over all seconds except pauses, 0 to 1; None before the first second."""
    total_seconds = sum(seconds.values()) - seconds["paused"]
    if total_seconds <= 0:
        return None
    return seconds["productive"] / total_seconds


def goodput_of(lines: Iterable[Line]) -> Goodput:
    """Build the account from timeline lines."""
    attempts: list[Attempt] = []
    for line in lines:
        if line.get("event") == "begin":
            attempts.append(Attempt(line))
        elif attempts:
            attempts[-1].see(line)
    # Backwards: all later attempts decide which steps were repeated.
    redone_from, skewed = float("inf"), 0
    for attempt in reversed(attempts):
        attempt.close(redone_from)
        # A later attempt may resume from an older checkpoint than the attempt before it.
        redone_from = min(redone_from, attempt.begin["step"])
    for attempt, next_attempt in pairwise(attempts):
        gap = attempt.gap_to(next_attempt)
        skewed += gap < 0
        kind: Kind = "stopped"
        if attempt.how in _ON_PURPOSE:
            kind = "paused"
        attempt.after = kind, max(0.0, gap)
    return Goodput(attempts=attempts, skewed=skewed)


def read_goodput(folder: Path) -> Goodput:
    """Return a run folder's account; without attempts if the run kept no timeline."""
    return goodput_of(read_timeline(folder))


def _kind_of_rest(line: Line) -> Kind:
    """Return the kind for the time after the last line, by current activity: an unfinished step is lost."""
    return _ACTIVITY_KINDS.get(line.get("in", "step"), "lost")
