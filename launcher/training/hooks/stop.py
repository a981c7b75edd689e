"""All ranks learn in one step whether any of them was asked to stop."""

from __future__ import annotations

import torch

from launcher.metrics.record import Record
from launcher.training.hook import Step, StepHook
from launcher.training.run import Run

_STOP = "stop"


class StopTogether(StepHook):
    """Sums over ranks who was asked."""

    def __init__(self, run: Run) -> None:
        self._stop = run.stop

    def before_forward(self, step: Step) -> None:
        """Have it summed with what the step reports."""
        step.summed[_STOP] = lambda device: torch.tensor([float(self._stop.is_asked())], device=device)

    def before_update(self, step: Step) -> None:
        """Note what all ranks know now."""
        step.stop_asked = bool(step.totals.summed[_STOP])

    def record(self, step: Step, record: Record) -> None:
        """Note how long a step takes, by which the time for a last save is reckoned."""
        self._stop.step_seconds = record["step_seconds"]
