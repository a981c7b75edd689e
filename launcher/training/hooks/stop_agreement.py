"""Agreement between all ranks, in each step, on a request to stop."""

from __future__ import annotations

import torch

from launcher.metrics.record import Record
from launcher.training.hook import RunningStep, StepHook
from launcher.training.run_state import TrainingRun

_STOP = "stop"


class StopTogether(StepHook):
    """Hook that sums stop requests over ranks."""

    def __init__(self, run: TrainingRun) -> None:
        self._stop = run.stop

    def before_forward(self, step: RunningStep) -> None:
        """Add this rank's request to the step's sums."""
        # Evaluated only when the step is summed, so a request during backward still counts.
        step.extra_sums[_STOP] = lambda device: torch.tensor([float(self._stop.is_requested())], device=device)

    def before_update(self, step: RunningStep) -> None:
        """Store the agreed result in the step."""
        step.stop_requested = bool(step.totals.summed[_STOP])

    def before_log(self, step: RunningStep, record: Record) -> None:
        """Store a step's seconds, from which the time for a last save is estimated."""
        self._stop.step_seconds = record["step_seconds"]
