"""Progress of a run, judged by its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.metrics.record import AUDIT_EVENT, METRICS_FILE, STOP_EVENT, Record, decode, truncate_after
from longctx.checkpoint_format import list_checkpoints

_TAIL_BYTES = 1 << 18
"""Of the metrics: some hundred lines."""


def last_step(folder: Path) -> int | None:
    """Return the step of the last training record; None if there is none yet."""
    return next((record["step"] for record in _newest_first(folder) if record.get("kind") == "train"), None)


def last_event(folder: Path) -> Record | None:
    """Return the run's last record if it is a requested stop or a wrong number; otherwise None."""
    newest = next(_newest_first(folder), None)
    if newest is None or newest.get("event") not in (STOP_EVENT, AUDIT_EVENT):
        return None
    return newest


def _newest_first(folder: Path) -> Iterator[Record]:
    """Yield the last records, newest first; none if there is no file yet."""
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
            # A killed run leaves half a line, and the tail may begin with half a line.
            continue


def newest_checkpoint(folder: Path) -> int | None:
    """Return the step of the newest committed checkpoint; None if there is none."""
    steps = [int(path.name.removeprefix("step_")) for path in list_checkpoints(folder)]
    return max(steps, default=None)


def begin_anew(folder: Path) -> None:
    """Discard the steps of a run without any checkpoint: its metrics move to ``metrics.discarded.jsonl``."""
    if (folder / METRICS_FILE).exists():
        truncate_after(folder, -1)
        (folder / METRICS_FILE).unlink()
