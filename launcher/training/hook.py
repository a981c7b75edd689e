"""``StepHook``: callbacks in a training step, and ``RunningStep``: the step's state, which they receive.

``TrainStep`` calls a step's hooks in this order; ``launcher/training/hooks`` has the hooks and their list:

    load data, count tokens → before_forward → forward and backward of all micro-batches, sum over ranks
    → before_update → optimizer update, or skip → after_update → before_log
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import Tensor

from launcher.metrics.record import Record
from launcher.training.history import History
from launcher.training.run_state import Progress
from launcher.training.step_prefetch import StepData
from launcher.training.totals import StepSums, StepTotals
from longctx.errors import GradientError
from longctx.model.experts.replay import RoutingReplay
from longctx.objectives.task import Counts


class StepHook:
    """Base class for hooks into each optimizer step. Every method is optional and does nothing by default.

    Hooks run in list order, on each rank whose list contains them. An exception ends the run and must be raised on
    every rank, otherwise the others wait in the next collective. So a hook that only some ranks have must neither raise
    nor call a collective.
    """

    def before_forward(self, step: RunningStep) -> None:
        """Prepare for the step, before its first micro-batch: ``data`` and ``counts`` are set."""

    def before_update(self, step: RunningStep) -> None:
        """Check ``totals`` and ``loss``, and ``refuse`` the update if necessary. Weights and moments are unchanged."""

    def after_update(self, step: RunningStep) -> None:
        """Process the result: weights have changed, or ``gradient_error`` is set and they have not."""

    def before_log(self, step: RunningStep, record: Record) -> None:
        """Add fields to the step's metrics record in place, or read it.

        The step's time has been measured: work here does not count as step time.
        """


@dataclass(kw_only=True)
class RunningStep:
    """State of one optimizer step while it runs.

    Fields without a default are unset until the stage in the comment above them: reading one raises AttributeError.
    """

    # Set from the start.
    number: int
    """The step's number in the run, from 1."""
    progress: Progress
    """The run's position before the step."""
    data: StepData
    data_wait_seconds: float
    """Seconds spent waiting for data."""
    scope: ExitStack
    """Closes resources that hooks open: after ``after_update``, or when the step raises."""

    # Set before ``before_forward``.
    counts: Counts = field(init=False)
    """Denominators of the step's losses, over all ranks."""

    # Set before ``before_update``.
    sums: StepSums = field(init=False)
    """This rank's sums over its micro-batches, from forward and backward."""
    totals: StepTotals = field(init=False)
    """The same sums over all ranks, equal on every rank."""
    loss: float = field(init=False)
    """Mean loss over all ranks' counted tokens; NaN if no token counts."""
    lr: float = field(init=False)
    """Learning rate for this update."""

    # Set before or in ``after_update``.
    grad_norm: float | None = None
    """Global gradient norm before clipping; None until the update, and if loss or router logits are not finite."""
    gradient_error: GradientError | None = None
    """Error from a refused update or a non-finite gradient; it ends the run unless ``skip_reason`` is set."""
    skip_reason: str = ""
    """Reason for skipping the step; empty if it is taken."""
    history: History
    """Statistics that the next step receives: initially those before this step, then with this step included."""

    # Set by hooks.
    stop_requested: bool = False
    """True if any rank was asked to stop after this step."""
    extra_sums: dict[str, Callable[[torch.device], Tensor]] = field(default_factory=dict)
    """Extra terms for the step's single all-reduce, by name: functions, called after backward, that return this rank's
    numbers [n] on the device. ``totals.summed`` has their sums under the same names."""
    before_micro_batch: list[Callable[[int], None]] = field(default_factory=list)
    """Functions called before each micro-batch's forward pass with its number, from 0."""
    routing_replay: Callable[[int], RoutingReplay | None] = lambda number: None
    """Function that returns, for a micro-batch's number, the expert choices to replay or an object that records them;
    None to route as usual."""
    _refusals: list[tuple[str, Callable[[float], bool]]] = field(default_factory=list)

    def refuse(self, reason: str, condition: Callable[[float], bool] = lambda norm: True) -> None:
        """Refuse this step's update if ``condition(gradient norm)`` is true; by default, always.

        Call it in ``before_update``, on all ranks, which must decide equally. ``condition`` should capture values, not
        the step: a reference to it would keep the step's data in memory until garbage collection.
        """
        self._refusals.append((reason, condition))

    def refusal_reason(self, norm: float) -> str:
        """Return the first reason that refuses an update with this gradient norm; empty if the update is accepted."""
        return next((reason for reason, condition in self._refusals if condition(norm)), "")
