"""Comparison between a run's steps and its plan."""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from launcher.metrics.record import Record
from launcher.plan.memory_estimate import gib
from launcher.training.hook import RunningStep, StepHook
from launcher.training.start import Expected

_STEPS = 1000
"""Recent steps in the compared median: a long run must not store all."""


class PlanWatch(StepHook):
    """Hook that compares a run's steps with their estimate, on rank 0."""

    def __init__(self, expected: Expected) -> None:
        self.expected = expected
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._peak_bytes = 0
        self._is_first = True

    def before_log(self, step: RunningStep, record: Record) -> None:
        """Add a step. A process's first step allocates and compiles, so its seconds do not count."""
        self._peak_bytes = max(self._peak_bytes, record["max_memory_bytes"])
        if not self._is_first:
            self._seconds.append(record["step_seconds"])
        self._is_first = False

    def comparison_record(self, step: int) -> Record:
        """Return the final event: measured values, and the plan's relative errors."""
        found: Record = {"kind": "event", "event": "plan_checked", "step": step, "peak_bytes": self._peak_bytes}
        if self._peak_bytes:
            # Errors are positive if the plan is too high.
            found["peak_error"] = self.expected.bytes.peak / self._peak_bytes - 1
        if self._seconds:
            found["step_seconds"] = statistics.median(self._seconds)
        if self._seconds and self.expected.seconds is not None:
            found["seconds_error"] = self.expected.seconds.total / found["step_seconds"] - 1
        return found


def comparison_line(record: dict[str, Any]) -> str:
    """Return the final line for the log."""
    line = f"Plan and run: {gib(record['peak_bytes'])} at the peak{_signed(record.get('peak_error'))}"
    if "step_seconds" in record:
        line += f", {record['step_seconds']:.3g} s per step in the median{_signed(record.get('seconds_error'))}"
    return f"{line}."


def _signed(error: float | None) -> str:
    if error is None:
        return ""
    return f" (plan {error:+.0%})"
