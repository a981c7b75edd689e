"""A run's progress, read from its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.metrics.record import AUDIT_EVENT, METRICS_FILE, STOP_EVENT, Record, decode, truncate_after
from longctx.checkpoint_format import list_checkpoints

_TAIL_BYTES = 1 << 18
"""Bytes to read from the end of the metrics: some hundred lines."""


def last_step(folder: Path) -> int | None:
    """Return the last training record's step; None without one."""
    return next((record["step"] for record in _newest_first(folder) if record.get("kind") == "train"), None)


def last_event(folder: Path) -> Record | None:
    """Return the run's last record if it is a requested stop or an audit's finding; otherwise None."""
    newest = next(_newest_first(folder), None)
    if newest is None or newest.get("event") not in (STOP_EVENT, AUDIT_EVENT):
        return None
    return newest


def _newest_first(folder: Path) -> Iterator[Record]:
    """Yield the last records, newest first; empty if there is no file yet."""
    try:
        with (folder / METRICS_FILE).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return
    for line in reversed(lines):
        try:
            yield decode(line)
        except ValueError:
            # A killed run leaves half a line, and the tail may start with half a line.
            continue


def newest_checkpoint_step(folder: Path) -> int | None:
    """Return the newest committed checkpoint's step; None without one."""
    steps = [int(path.name.removeprefix("step_")) for path in list_checkpoints(folder)]
    return max(steps, default=None)


def discard_steps(folder: Path) -> None:
    """Discard the steps in a run without a checkpoint: its metrics move to ``metrics.discarded.jsonl``."""
    if (folder / METRICS_FILE).exists():
        truncate_after(folder, -1)
        (folder / METRICS_FILE).unlink()
