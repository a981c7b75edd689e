"""How a run ends if a number was wrong: the event and the way out that hooks share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.metrics.record import AUDIT_EVENT, Record
from launcher.training.run import Run
from longctx.checkpoint_format import list_checkpoints


def newest_checkpoint(run: Run, *, without: str = "") -> Path | None:
    """Return the run's newest checkpoint, also one that is still being written; None if there is none.

    ``without`` is the name of one that may hold what was wrong.
    """
    run.saver.finish()
    return next((path for path in reversed(list_checkpoints(run.folder)) if path.name != without), None)


def way_out(checkpoint: Path | None) -> str:
    """Return how to go on from a checkpoint, None if there is none; without the end of the sentence."""
    if checkpoint is None:
        return "There is no checkpoint yet: start again"
    return f"Go on from the newest checkpoint, {checkpoint} (--run.resume latest)"


def wrong_number(run: Run, step: int, findings: Sequence[Record]) -> Record:
    """Return the event of the run's metrics, by which ``longctx run`` knows whom to leave out.

    Each finding has ``ranks`` of which one is at fault, the ``hosts`` of these, and ``what`` was wrong.
    """
    return {
        "kind": "event",
        "event": AUDIT_EVENT,
        "step": step,
        "world_size": run.mesh.world_size,
        "findings": list(findings),
    }
