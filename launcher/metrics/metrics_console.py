"""Console line for a record, remaining time of a run, and live progress line on a terminal."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from launcher.metrics.expert_load import worst_max_over_mean
from launcher.wording import short_duration

if TYPE_CHECKING:  # rich is imported only if a terminal is watched
    from rich.progress import Progress


def short_number(value: float) -> str:
    """Format three or four significant digits with k, M, G or T: ``10132 -> 10.1k``."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        # A value that rounds up to the unit gets it: 999.96 is 1.0k, not 1000.
        if abs(value) >= size * 0.9995:
            scaled = value / size
            if abs(scaled) >= 99.95:
                return f"{scaled:.0f}{unit}"
            return f"{scaled:.1f}{unit}"
    if float(value).is_integer() or abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}"


class EtaEstimator:
    """Remaining-time estimator over recent steps, including validations and checkpoints between them."""

    WINDOW_STEPS = 100
    """Window in steps; a machine's speed may change during a run."""

    def __init__(self, step: int, now: float) -> None:
        """Start at ``step`` at time ``now``, in seconds on any monotonic clock."""
        self._times = deque([(step, now)], maxlen=self.WINDOW_STEPS + 1)

    def seconds_left(self, step: int, last_step: int, now: float) -> float | None:
        """Estimate seconds until ``last_step``, with ``step`` completed at ``now``; None before the first step."""
        if step > self._times[-1][0]:
            self._times.append((step, now))
        first_step, first_time = self._times[0]
        if step <= first_step:
            return None
        return (now - first_time) / (step - first_step) * (last_step - step)


_LEFT_OUT_FIRST = (
    "goodput",
    "data_wait_seconds",
    "experts",
    "max_memory_bytes",
    "mfu",
    "num_targets",
    "tokens",
    "step_seconds",
    "lr",
    "grad_norm",
    "dropped",
)
"""Parts that a narrow terminal omits, in this order."""


def console_line(
    record: Mapping[str, Any],
    total_steps: int | None = None,
    *,
    seconds_left: float | None = None,
    columns: int | None = None,
) -> str:
    """Format a record as one line with fixed order and units; omit values missing from the record.

    Omit the least important parts as well if the line exceeds ``columns``.
    """
    step = str(record["step"])
    if total_steps is not None:
        # Floor division: 100% only at the last step.
        done = f"{100 * record['step'] // max(1, total_steps)}%"
        # Pad to the last step's width, so that a run's lines align.
        step = f"{record['step']:>{len(str(total_steps))}}/{total_steps} {done:>4}"
    parts = {"step": f"step {step}"}
    if record["kind"] == "train":
        parts |= _train_parts(record)
    elif record["kind"] == "validation":
        parts |= _validation_parts(record)
    else:
        parts["event"] = record["event"]
    if seconds_left:
        parts["left"] = f"{short_duration(seconds_left)} left"
    # Measure again after each removal: a narrow terminal loses only as many parts as necessary.
    for name in _LEFT_OUT_FIRST:
        if columns is not None and len("  ".join(parts.values())) > columns:
            parts.pop(name, None)
    return "  ".join(parts.values())


def _train_parts(record: Mapping[str, Any]) -> dict[str, str]:
    formats = (
        ("loss", lambda x: f"loss {x:.4f}"),
        ("class_accuracy", lambda x: f"accuracy {x:.1%}"),
        ("preference_accuracy", lambda x: f"preferred {x:.1%}"),
        ("reward_margin", lambda x: f"margin {x:.3f}"),
        ("reference_kl", lambda x: f"kl {x:.3f}"),
        ("grad_norm", lambda x: f"grad {x:.2f}"),
        ("lr", lambda x: f"lr {x:.1e}"),
        ("tokens", lambda x: f"{short_number(x)} tokens"),
        ("tokens_per_second", lambda x: f"{short_number(x)} tok/s"),
        ("step_seconds", lambda x: f"{x:.2f} s"),
        ("data_wait_seconds", lambda x: f"data {x:.2f} s"),
        ("max_memory_bytes", lambda x: f"mem {x / 2**30:.1f} GiB"),
        ("mfu", lambda x: f"mfu {x:.1%}"),
        ("goodput", lambda x: f"goodput {x:.1%}"),
        ("stalled_seconds", lambda x: f"stalled {x:.1f} s"),
    )
    parts = {"loss": "no target tokens"} if record["loss"] is None else {}
    for key, form in formats:
        # Records contain 0 if the device cannot report its peak memory.
        is_unknown = record.get(key) is None or (key == "max_memory_bytes" and not record[key])
        if not is_unknown:
            parts[key] = form(record[key])
    worst = worst_max_over_mean(record.get("expert_load") or [])
    if worst is not None:
        parts["experts"] = f"experts max/mean {worst:.2f}"
    dropped = max(record.get("expert_dropped_share") or [], default=0)
    if dropped > 0:
        parts["dropped"] = f"dropped {dropped:.1%}"
    return parts


def _validation_parts(record: Mapping[str, Any]) -> dict[str, str]:
    if record["loss"] is None:
        return {"loss": "validation: no target tokens"}
    parts = {"loss": f"validation loss {record['loss']:.4f}"}
    # The unigram entropy is the loss when a model knows token frequencies only: a useful model is below it.
    entropy = record.get("unigram_entropy")
    if entropy is not None:
        side = "below"
        if record["loss"] > entropy:
            side = "above"
        distance = abs(record["loss"] - entropy)
        name = "the unigram entropy"
        if record.get("class_accuracy") is not None:
            parts["class_accuracy"] = f"accuracy {record['class_accuracy']:.1%}"
            name = "the entropy of the classes"
        parts["frequencies"] = f"{distance:.4f} nats {side} {name} {entropy:.4f}"
    if record.get("preference_accuracy") is not None:
        parts["preference_accuracy"] = f"preferred {record['preference_accuracy']:.1%}"
    if record.get("num_targets") is not None:
        parts["num_targets"] = f"{short_number(record['num_targets'])} targets"
    return parts


def can_resample(stream: TextIO) -> bool:
    """Return True if the stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class LiveLine:
    """Progress bar over steps, with loss, speed, current activity and remaining time."""

    def __init__(self, total_steps: int, *, is_shown: bool) -> None:
        self._total_steps, self._is_shown = total_steps, is_shown
        self._bar: Progress | None = None
        self._redirected: list[tuple[logging.StreamHandler, TextIO]] = []

    def start(self) -> None:
        """Draw the line and redirect the log so that log lines appear above it."""
        if not self._is_shown:
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            TaskProgressColumn(show_speed=False),
            TextColumn("{task.fields[note]}", markup=False),
            TimeElapsedColumn(),
        )
        terminal = sys.stdout
        # Four redraws per second: redrawing takes CPU time from the step.
        self._bar = Progress(*columns, console=Console(file=terminal), transient=True, refresh_per_second=4)
        self._bar.add_task("step 1", total=self._total_steps, note="")
        self._bar.start()
        # From now on sys.stdout writes above the line, but the log handler still holds the terminal itself.
        for handler in logging.getLogger("launcher").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                handler.setStream(sys.stdout)
                self._redirected.append((handler, terminal))

    def update(self, record: Mapping[str, Any], *, seconds_left: float | None) -> None:
        """Show a completed step."""
        if self._bar is None:
            return
        parts = ["no target tokens" if record["loss"] is None else f"loss {record['loss']:.4f}"]
        if record.get("tokens_per_second"):
            parts.append(f"{short_number(record['tokens_per_second'])} tok/s")
        if seconds_left is not None:
            parts.append(f"{short_duration(seconds_left)} left")
        self._bar.update(
            self._bar.task_ids[0],
            completed=record["step"],
            description=f"step {record['step']}/{self._total_steps}",
            note="  ".join(parts),
        )

    def say(self, text: str) -> None:
        """Show the current activity between two steps."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], note=text)

    def stop(self) -> None:
        """Remove the line and return the terminal to the log. Safe to call twice."""
        if self._bar is None:
            return
        for handler, terminal in self._redirected:
            handler.setStream(terminal)
        self._redirected.clear()
        self._bar.stop()
        self._bar = None
