"""Agreement of all ranks, in each step, on a request to stop."""

from __future__ import annotations

import torch

from launcher.metrics.record import Record
from launcher.training.hook import Step, StepHook
from launcher.training.run import Run

_STOP = "stop"


class StopTogether(StepHook):
    """Hook that sums requests to stop over ranks."""

    def __init__(self, run: Run) -> None:
        self._stop = run.stop

    def before_forward(self, step: Step) -> None:
        """Add this rank's request to the sums of the step."""
        step.summed[_STOP] = lambda device: torch.tensor([float(self._stop.is_asked())], device=device)

    def before_update(self, step: Step) -> None:
        """Store the agreed result in the step."""
        step.stop_asked = bool(step.totals.summed[_STOP])

    def record(self, step: Step, record: Record) -> None:
        """Store the seconds of a step, from which the time for a last save is estimated."""
        self._stop.step_seconds = record["step_seconds"]
