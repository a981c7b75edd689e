"""``StepHook``: an extension to the training step, and ``RunningStep``, the running step as hooks see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.metrics.record import Record
from launcher.training.feed import StepData
from launcher.training.history import History
from launcher.training.run_state import Progress
from launcher.training.totals import StepSums, StepTotals
from longctx.errors import GradientError
from longctx.model.experts.replay import RoutingReplay
from longctx.objectives.task import Counts


@dataclass(kw_only=True)
class RunningStep:
    """A running step. Fields computed later are unset until then."""

    number: int
    progress: Progress
    """The run's position before the step."""
    data: StepData
    waited: float
    """Seconds spent waiting for data."""
    scope: ExitStack
    """Closes resources that hooks open, however the step ends."""
    counts: Counts = field(init=False)
    """The step's denominators, over all ranks."""
    sums: StepSums = field(init=False)
    """This rank's sums from forward and backward."""
    totals: StepTotals = field(init=False)
    """Sums over all ranks."""
    loss: float = field(init=False)
    lr: float = field(init=False)
    grad_norm: float | None = None
    """Norm before clipping; None if the loss already causes the step to be skipped."""
    skipped: str = ""
    """Reason for skipping the step; empty if it is taken."""
    history: History
    """History for later steps; until the update, that before this step."""
    stop_requested: bool = False
    """True if any rank was asked to stop after this step."""
    failure: GradientError | None = None
    """Error that refused the update, once it was tried."""
    summed: dict[str, Callable[[torch.device], Tensor]] = field(default_factory=dict)
    """This rank's additions to the step's single all-reduce, by name; ``totals.summed`` has the sums."""
    each_micro_batch: list[Callable[[int], None]] = field(default_factory=list)
    """Called with each micro-batch's number before its forward pass."""
    choices: Callable[[int], RoutingReplay | None] = lambda number: None
    """Expert choices that a micro-batch replays, or an object that records them."""
    _refusals: list[tuple[str, Callable[[float], bool]]] = field(default_factory=list)

    def refuse(self, why: str, condition: Callable[[float], bool] = lambda norm: True) -> None:
        """Skip the update, or only if ``condition`` is true for its gradient norm. Call it on all ranks.

        A ``condition`` that references the step keeps the step's data in memory.
        """
        self._refusals.append((why, condition))

    def skip_reason(self, norm: float) -> str:
        """Return the reason for refusing an update with this gradient norm; empty if it is not refused."""
        # The first hook that refuses gives the reason.
        return next((why for why, condition in self._refusals if condition(norm)), "")


class StepHook:
    """Hook into each step in a run, called on every rank that lists it, in list order.

    An exception ends the run, and must be raised on every rank: the others would wait in the next collective.
    """

    def before_forward(self, step: RunningStep) -> None:
        """Prepare for the step; its data and counts are set."""

    def before_update(self, step: RunningStep) -> None:
        """Check ``step.totals``, and ``refuse`` the update if necessary. No state has changed yet."""

    def after_update(self, step: RunningStep) -> None:
        """Process the result: weights have changed, or the step was skipped."""

    def record(self, step: RunningStep, record: Record) -> None:
        """Add to the step's record, or read it. The step's time has already been measured."""
