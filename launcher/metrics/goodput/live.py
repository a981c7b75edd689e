"""Effective training time while a run goes on: its timeline is written, and its account kept, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from launcher.metrics.goodput.account import Goodput, Kind, Seconds, Tally, effective_share, read_goodput
from launcher.metrics.goodput.timeline import Doing, How, Line, Timeline
from launcher.metrics.record import STOP_EVENT, Record
from launcher.wording import plural, short_duration

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
    """The account of a run while it goes on: all that came before this attempt, and this one's lines."""

    def __init__(self, before: Goodput) -> None:
        """``before`` includes the beginning of this attempt."""
        self._before, self._tally = before.seconds(), Tally(before.attempts[-1].tally.until)
        self._stalls, self.restarts = before.stalls, len(before.attempts) - 1

    def add(self, line: Line) -> float:
        """Take in a new line of this attempt; returns its stalled seconds."""
        return sum(seconds for kind, seconds in self._tally.add(line) if kind == "stalled")

    def seconds(self) -> Seconds:
        """By kind."""
        now = self._tally.seconds()
        return {kind: seconds + now[kind] for kind, seconds in self._before.items()}

    def metrics(self) -> dict[str, Any]:
        """The fields of a train record."""
        return {
            "goodput": effective_share(self.seconds()),
            "stalls": self._stalls + self._tally.stalls,
            "restarts": self.restarts,
        }


class RunTime:
    """Writes what an attempt does to its run's timeline, and says what share of the time was training."""

    def __init__(self, folder: Path, *, step: int) -> None:
        """The attempt goes on from ``step``."""
        self._folder, self._timeline = folder, Timeline(folder, step=step)
        goodput = read_goodput(folder)
        # Without attempts the file could not be written, and nobody knows anything.
        self._live = LiveGoodput(goodput) if goodput.attempts else None
        self.how: How = "done"
        """Why the attempt ends."""

    def doing(self, doing: Doing) -> None:
        """Something other than a step begins."""
        self._take(self._timeline.begin(doing))

    def see(self, record: Mapping[str, Any]) -> Record:
        """Take in a record as it is written; returns what it gains."""
        if record.get("event") == STOP_EVENT:
            self.how = "stopped"
            # Nobody has asked for that.
            if record["reason"] == "launcher":
                self.how = "launcher"
        if record["kind"] == "validation":
            self._take(self._timeline.did())
        # A step that could not be taken has no time of its own: it never ended.
        if record["kind"] != "train" or record.get("step_seconds") is None:
            return {}
        more: dict[str, Any] = {"wait": round(record.get("data_wait_seconds") or 0.0, 4)}
        if record.get("model_tflops"):
            more["work"] = float(f"{record['model_tflops'] * record['step_seconds']:.6g}")
        if record.get("skipped"):
            more["skipped"] = True
        stalled = sum(map(self._take, self._timeline.step(record["step"], record["step_seconds"], **more)))
        if self._live is None:
            return {}
        found = self._live.metrics()
        if stalled:
            found["stalled_seconds"] = stalled
        return found

    def end(self, *, failed: bool) -> str:
        """The attempt ends, by an error or else as its records say; returns a line for the log."""
        if failed:
            self.how = "failed"
        self._timeline.end(self.how)
        # What ends a run is the last that is said.
        if failed or self._live is None:
            return ""
        # Of the file, as the report has it: what lies behind the last step belongs to the account, too.
        return in_words(read_goodput(self._folder).seconds(), self._live.restarts)

    def _take(self, line: Line | None) -> float:
        if line is None or self._live is None:
            return 0.0
        return self._live.add(line)


def in_words(seconds: Seconds, restarts: int) -> str:
    """One line: the share that was training, of how long, and where the rest went; empty before the first second."""
    share = effective_share(seconds)
    if share is None:
        return ""
    counted = sum(seconds.values()) - seconds["paused"]
    line = f"Effective training time: {share:.1%} of {short_duration(counted)}"
    if restarts:
        line += f", {plural(restarts, 'restart')}"
    # What is less than a thousandth does not explain where the time went.
    parts = [(seconds[kind], name) for kind, name in _LOSSES.items() if seconds[kind] >= 0.001 * counted]
    told = ", ".join(f"{name} {lost / counted:.1%}" for lost, name in sorted(parts, reverse=True))
    if told:
        line += f" ({told})"
    if seconds["paused"] >= 1:
        line += f". Paused for {short_duration(seconds['paused'])}, which is not counted"
    return f"{line}."
