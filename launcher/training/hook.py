"""``StepHook``: an extension of the training step, and ``Step``, the running step as hooks see it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.metrics.record import Record
from launcher.training.feed import StepData
from launcher.training.history import History
from launcher.training.run import Progress
from launcher.training.totals import StepSums, StepTotals
from longctx.errors import GradientError
from longctx.model.experts.replay import RoutingReplay
from longctx.objectives.task import Counts


@dataclass(kw_only=True)
class Step:
    """A running step. Fields that become known later are unset until then."""

    number: int
    progress: Progress
    """Where the run stood before it."""
    data: StepData
    waited: float
    """Seconds that the data was waited for."""
    scope: ExitStack
    """Closes what a hook opens, however the step ends."""
    counts: Counts = field(init=False)
    """The step's denominators, over all ranks."""
    sums: StepSums = field(init=False)
    """This rank's, of forward and backward."""
    totals: StepTotals = field(init=False)
    """Those of all ranks."""
    loss: float = field(init=False)
    lr: float = field(init=False)
    grad_norm: float | None = None
    """Before clipping; None if the loss says already that the step is left out."""
    skipped: str = ""
    """Why it is left out; empty for one that is taken."""
    history: History
    """What later steps are told of it: until then, of those before."""
    stop_asked: bool = False
    """Whether any rank has been asked to stop behind it."""
    failure: GradientError | None = None
    """What the update was refused by, once it was tried."""
    summed: dict[str, Callable[[torch.device], Tensor]] = field(default_factory=dict)
    """Numbers of this rank that go into the step's one sum over ranks, by name; ``totals.summed`` has the sums."""
    each_micro_batch: list[Callable[[int], None]] = field(default_factory=list)
    """Called with the number of each micro-batch before its forward pass."""
    choices: Callable[[int], RoutingReplay | None] = lambda number: None
    """The experts that a micro-batch's tokens go to, or where their choice is noted."""
    _refusals: list[tuple[str, Callable[[float], bool]]] = field(default_factory=list)

    def refuse(self, why: str, when: Callable[[float], bool] = lambda norm: True) -> None:
        """Leave out the update, or only if ``when`` is true for the norm of its gradient. Call it on all ranks.

        A ``when`` that references the step keeps the step's data in memory.
        """
        self._refusals.append((why, when))

    def refused(self, norm: float) -> str:
        """Return the reason for refusing an update with a gradient of this norm; empty if it is not refused."""
        return next((why for why, when in self._refusals if when(norm)), "")


class StepHook:
    """Hook into each step of a run, called on every rank that has it in its list, in the list's order.

    An exception ends the run, and must be raised on every rank: the others would wait in the next collective.
    """

    def before_forward(self, step: Step) -> None:
        """Prepare for the step; its data and counts are set."""

    def before_update(self, step: Step) -> None:
        """Check ``step.totals``, and ``refuse`` the update if necessary. Nothing has changed yet."""

    def after_update(self, step: Step) -> None:
        """Process the result: weights have changed, or the step was left out."""

    def record(self, step: Step, record: Record) -> None:
        """Add to the step's record, or read it. The step's time has already been measured."""
