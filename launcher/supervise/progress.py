"""How far a run has come, by what it left in its folder."""

from __future__ import annotations

from pathlib import Path

from launcher.metrics.record import METRICS_FILE, decode, settle
from longctx.checkpoint_format import list_checkpoints

_TAIL_BYTES = 1 << 18
"""Of the metrics: some hundred lines."""


def last_step(folder: Path) -> int | None:
    """The step of the last training record; None where there is none yet."""
    try:
        with (folder / METRICS_FILE).open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(size - _TAIL_BYTES, 0))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        try:
            record = decode(line)
        except (ValueError, LookupError, TypeError, AttributeError):
            # A run that was killed leaves half a line, and the tail may begin with one.
            continue
        if record.get("kind") == "train":
            return record["step"]
    return None


def newest_checkpoint(folder: Path) -> int | None:
    """The step of the newest committed checkpoint; None where there is nothing to go on from."""
    steps = [int(path.name.removeprefix("step_")) for path in list_checkpoints(folder)]
    return max(steps, default=None)


def begin_anew(folder: Path) -> None:
    """Set a run without any checkpoint aside: its metrics move to ``metrics.discarded.jsonl``."""
    if (folder / METRICS_FILE).exists():
        settle(folder, last_step=-1)
        (folder / METRICS_FILE).unlink()
