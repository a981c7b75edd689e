"""How far a run has come, by what it left in its folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from launcher.metrics.record import AUDIT_EVENT, METRICS_FILE, STOP_EVENT, Record, decode, truncate_after
from longctx.checkpoint_format import list_checkpoints

_TAIL_BYTES = 1 << 18
"""Of the metrics: some hundred lines."""


def last_step(folder: Path) -> int | None:
    """The step of the last training record; None where there is none yet."""
    return next((record["step"] for record in _newest_first(folder) if record.get("kind") == "train"), None)


def last_event(folder: Path) -> Record | None:
    """The stop that was asked for, or the wrong number, if that is the last thing that the run has recorded."""
    newest = next(_newest_first(folder), None)
    if newest is None or newest.get("event") not in (STOP_EVENT, AUDIT_EVENT):
        return None
    return newest


def _newest_first(folder: Path) -> Iterator[Record]:
    """The last records, from the end; nothing where there is no file yet."""
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
            # A run that was killed leaves half a line, and the tail may begin with one.
            continue


def newest_checkpoint(folder: Path) -> int | None:
    """The step of the newest committed checkpoint; None where there is nothing to go on from."""
    steps = [int(path.name.removeprefix("step_")) for path in list_checkpoints(folder)]
    return max(steps, default=None)


def begin_anew(folder: Path) -> None:
    """Set a run without any checkpoint aside: its metrics move to ``metrics.discarded.jsonl``."""
    if (folder / METRICS_FILE).exists():
        truncate_after(folder, -1)
        (folder / METRICS_FILE).unlink()
