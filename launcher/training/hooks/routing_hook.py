"""Recording of the experts that tokens choose, or replay of another run's choices."""

from __future__ import annotations

from launcher.training.hook import RunningStep, StepHook
from launcher.training.run_state import TrainingRun


class RoutingHook(StepHook):
    """Hook that reads and writes a run's routing files, one per step."""

    def __init__(self, run: TrainingRun) -> None:
        self._run, self._files = run, run.routing

    def before_forward(self, step: RunningStep) -> None:
        """Give each micro-batch the choices that it records or replays. Collective if it replays."""
        # Replaying reads the step's file here, so that a damaged file fails on every rank.
        self._files.begin(step.number, step.data.order, self._run.token_indices(step.data))
        step.routing_replay = self._files.replay

    def after_update(self, step: RunningStep) -> None:
        """Write the choices. Collective."""
        self._files.end()
