"""End of a run after a wrong number: the event and the way to go on, shared by hooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.metrics.record import AUDIT_EVENT, Record
from launcher.training.run import Run
from longctx.checkpoint_format import list_checkpoints


def newest_checkpoint(run: Run, *, without: str = "") -> Path | None:
    """Return the run's newest checkpoint, even if it is still being written; None if there is none.

    ``without`` is the name of a checkpoint to exclude, which may contain the error.
    """
    run.saver.finish()
    return next((path for path in reversed(list_checkpoints(run.folder)) if path.name != without), None)


def way_out(checkpoint: Path | None) -> str:
    """Describe the way to go on from a checkpoint, or None if there is none, without a final period."""
    if checkpoint is None:
        return "There is no checkpoint yet: start again"
    return f"Go on from the newest checkpoint, {checkpoint} (--run.resume latest)"


def wrong_number(run: Run, step: int, findings: Sequence[Record]) -> Record:
    """Return the event for the run's metrics that tells ``longctx run`` which hosts to leave out.

    Each finding has ``ranks`` of which one is at fault, their ``hosts``, and the wrong item in ``what``.
    """
    return {
        "kind": "event",
        "event": AUDIT_EVENT,
        "step": step,
        "world_size": run.mesh.world_size,
        "findings": list(findings),
    }
