"""A run's end after a wrong number: the event and how to continue, shared by hooks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from launcher.metrics.record import AUDIT_EVENT, Record
from launcher.training.run_state import TrainingRun
from longctx.checkpoint_format import list_checkpoints


def newest_complete_checkpoint(run: TrainingRun, *, without: str = "") -> Path | None:
    """Wait for pending saves, and return the run's newest checkpoint; None if there is none.

    ``without`` names a checkpoint to exclude, which may contain the error.
    """
    # A checkpoint counts only once it is complete.
    run.saver.finish()
    return next((path for path in reversed(list_checkpoints(run.folder)) if path.name != without), None)


def way_out(checkpoint: Path | None) -> str:
    """Describe how to continue from a checkpoint, or without one, without a final period."""
    if checkpoint is None:
        return "There is no checkpoint yet: start again"
    return f"Resume from the newest checkpoint, {checkpoint} (--run.resume latest)"


def fault_event(run: TrainingRun, step: int, results: Sequence[Record]) -> Record:
    """Return the metrics event that tells ``longctx run`` which hosts to exclude.

    Each finding has ``ranks``, one of which is at fault, their ``hosts``, and the wrong item in ``what``.
    """
    return {
        "kind": "event",
        "event": AUDIT_EVENT,
        "step": step,
        "world_size": run.mesh.world_size,
        "findings": list(results),
    }
