"""One living line below the log, for a person who watches a terminal. Files and pipes never get it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TextIO

from launcher.metrics.console import short_number
from launcher.wording import short_duration

if TYPE_CHECKING:  # rich is imported where a terminal is watched, and nowhere else
    from rich.progress import Progress


def is_watched(stream: TextIO) -> bool:
    """Whether the stream is a terminal that can redraw a line."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


class LiveLine:
    """A bar of the steps with loss, speed, what happens now and the time left."""

    def __init__(self, total_steps: int, *, is_shown: bool) -> None:
        self._total_steps, self._is_shown = total_steps, is_shown
        self._bar: Progress | None = None
        self._redirected: list[tuple[logging.StreamHandler, TextIO]] = []

    def start(self) -> None:
        """Draw the line, and let the log's lines appear above it."""
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
        # Four times a second: redrawing takes processor time from the step.
        self._bar = Progress(*columns, console=Console(file=terminal), transient=True, refresh_per_second=4)
        self._bar.add_task("step 1", total=self._total_steps, note="")
        self._bar.start()
        # From now on sys.stdout writes above the line; the log's handler still holds the terminal itself.
        for handler in logging.getLogger("launcher").handlers:
            if isinstance(handler, logging.StreamHandler) and handler.stream is terminal:
                handler.setStream(sys.stdout)
                self._redirected.append((handler, terminal))

    def update(self, record: Mapping[str, Any], *, seconds_left: float | None) -> None:
        """Show a step that was taken."""
        if self._bar is None:
            return
        parts = [f"loss {record['loss']:.4f}"]
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

    def say(self, what: str) -> None:
        """Show what happens between two steps."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], note=what)

    def stop(self) -> None:
        """Take the line away and give the terminal back to the log. Safe to call twice."""
        if self._bar is None:
            return
        for handler, terminal in self._redirected:
            handler.setStream(terminal)
        self._redirected.clear()
        self._bar.stop()
        self._bar = None
