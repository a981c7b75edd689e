"""Agreement between all ranks, in each step, on a request to stop."""

from __future__ import annotations

import torch

from launcher.metrics.record import Record
from launcher.training.hook import Step, StepHook
from launcher.training.run import Run

_STOP = "stop"


class StopTogether(StepHook):
    """Hook that sums stop requests over ranks."""

    def __init__(self, run: Run) -> None:
        self._stop = run.stop

    def before_forward(self, step: Step) -> None:
        """Add this rank's request to the step's sums."""
        # Evaluated only when the step is summed, so a request during backward still counts.
        step.summed[_STOP] = lambda device: torch.tensor([float(self._stop.is_asked())], device=device)

    def before_update(self, step: Step) -> None:
        """Store the agreed result in the step."""
        step.stop_asked = bool(step.totals.summed[_STOP])

    def record(self, step: Step, record: Record) -> None:
        """Store a step's seconds, from which the time for a last save is estimated."""
        self._stop.step_seconds = record["step_seconds"]
