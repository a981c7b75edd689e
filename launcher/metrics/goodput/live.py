"""Effective training time during a run: rank 0 writes the timeline and updates its account."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.metrics.goodput.account import Goodput, Kind, Seconds, Tally, effective_share, read_goodput
from launcher.metrics.goodput.timeline import How, Line, RunActivity, Timeline
from launcher.metrics.record import STOP_EVENT, Record
from launcher.wording import format_count, short_duration

_LOSSES: dict[Kind, str] = {
    "lost": "lost",
    "starting": "starting",
    "warm_up": "first steps",
    "saving": "saving",
    "validation": "validation",
    "data": "waiting for data",
    "stalled": "stalls",
    "skipped": "skipped",
    "stopped": "stopped",
    "other": "other",
}


class LiveGoodput:
    """Running account: all earlier attempts plus this attempt's lines."""

    def __init__(self, before: Goodput) -> None:
        """Start from ``before``, which includes the start of this attempt."""
        # The tally starts at the attempt's last known time: ``before`` has all earlier seconds.
        self._before, self._tally = before.seconds(), Tally(before.attempts[-1].tally.until)
        self._stalls, self.restarts = before.stalls, len(before.attempts) - 1

    def add(self, line: Line) -> float:
        """Add a line from this attempt; return its stalled seconds."""
        return sum(seconds for kind, seconds in self._tally.add(line) if kind == "stalled")

    def seconds(self) -> Seconds:
        """Return seconds by kind."""
        now = self._tally.seconds()
        return {kind: seconds + now[kind] for kind, seconds in self._before.items()}

    def metrics(self) -> dict[str, Any]:
        """Return the goodput fields for a train record."""
        return {
            "goodput": effective_share(self.seconds()),
            "stalls": self._stalls + self._tally.stalls,
            "restarts": self.restarts,
        }


class RunTime:
    """Timeline writer for one attempt, which also computes the share of time spent training."""

    def __init__(self, folder: Path, *, step: int) -> None:
        """Begin the attempt, which resumes from ``step``."""
        self._folder, self._timeline = folder, Timeline(folder, step=step)
        goodput = read_goodput(folder)
        # Without attempts the file could not be written: keep no account.
        self._live = LiveGoodput(goodput) if goodput.attempts else None
        self.how: How = "done"
        """Reason for the attempt's end."""

    def begin(self, activity: RunActivity) -> None:
        """Begin an activity other than a step."""
        self._take(self._timeline.begin(activity))

    def see(self, record: Mapping[str, Any]) -> Record:
        """Process a record before it is written; return the fields to add to it."""
        if record.get("event") == STOP_EVENT:
            self.how = "stopped"
            # A stop because the launcher is gone was not requested.
            if record["reason"] == "launcher":
                self.how = "launcher"
        if record["kind"] == "validation":
            self._take(self._timeline.did())
        # A step that could not be taken has no duration: it never ended.
        if record["kind"] != "train" or record.get("step_seconds") is None:
            return {}
        fields: dict[str, Any] = {"wait": round(record.get("data_wait_seconds") or 0.0, 4)}
        # The account compares FLOPs to tell a long step from a stall.
        if record.get("model_tflops"):
            fields["work"] = float(f"{record['model_tflops'] * record['step_seconds']:.6g}")
        if record.get("skipped"):
            fields["skipped"] = True
        stalled = sum(map(self._take, self._timeline.step(record["step"], record["step_seconds"], **fields)))
        if self._live is None:
            return {}
        found = self._live.metrics()
        if stalled:
            found["stalled_seconds"] = stalled
        return found

    def end(self, *, failed: bool) -> str:
        """End the attempt; return a summary line for the log, empty after an error or without an account."""
        if failed:
            self.how = "failed"
        self._timeline.end(self.how)
        # The error that ends a run must be the last message.
        if failed or self._live is None:
            return ""
        # Read the file, as the report does: the time after the last step counts too.
        return in_words(read_goodput(self._folder).seconds(), self._live.restarts)

    def _take(self, line: Line | None) -> float:
        if line is None or self._live is None:
            return 0.0
        return self._live.add(line)


def in_words(seconds: Seconds, restarts: int) -> str:
    """Summarize in one line: training share, total time and losses; empty before the first second."""
    share = effective_share(seconds)
    if share is None:
        return ""
    total_seconds = sum(seconds.values()) - seconds["paused"]
    line = f"Effective training time: {share:.1%} of {short_duration(total_seconds)}"
    if restarts:
        line += f", {format_count(restarts, 'restart')}"
    # Losses below a thousandth are too small to report.
    parts = [(seconds[kind], name) for kind, name in _LOSSES.items() if seconds[kind] >= 0.001 * total_seconds]
    losses = ", ".join(
        f"{name} {kind_seconds / total_seconds:.1%}" for kind_seconds, name in sorted(parts, reverse=True)
    )
    if losses:
        line += f" ({losses})"
    if seconds["paused"] >= 1:
        line += f". Paused for {short_duration(seconds['paused'])}, not counted"
    return f"{line}."
