"""A step that is not finite, or a spike, is left out on every rank; too many in a row end the run."""

from __future__ import annotations

import logging
import math

from launcher.metrics.record import Record
from launcher.training.broken_step import find_broken
from launcher.training.history import History
from launcher.training.hook import Step, StepHook
from launcher.training.run import Run

log = logging.getLogger(__name__)

_NOT_FINITE = _ROUTER, _LOSS, _GRADIENT = "router", "loss", "gradient"
_SPIKE = "spike"


class NonFinite(StepHook):
    """Refuses such updates, and keeps the history by which a spike is known."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._routers: list[str] = []

    def before_update(self, step: Step) -> None:
        """Refuse an update whose routers or loss are not finite, or whose norm is a spike."""
        self._routers = step.totals.broken_routers(self._run.expert_layers)
        if self._routers:
            step.refuse(_ROUTER)
        if not step.totals.finite:
            step.refuse(_LOSS)
        # The norm is refused by the engine if it is not finite: nothing else is then left to say.
        step.refuse(_GRADIENT, lambda norm: not math.isfinite(norm))
        # Without the step itself, which would then hold its data until a collection of garbage.
        history, loss = step.progress.history, step.loss
        step.refuse(_SPIKE, lambda norm: bool(self._spike(history, loss, norm)))

    def after_update(self, step: Step) -> None:
        """Add the step to the history; TrainingError if it was left out as so many before. Collective then."""
        history = step.progress.history
        if step.failure is None:
            assert step.grad_norm is not None
            step.history = history.taken(step.loss, step.grad_norm)
            return
        gradient, norm, spike, refused = step.failure, step.failure.norm, "", ""
        step.skipped = step.refused(norm)
        if step.skipped == _SPIKE:
            spike = self._spike(history, step.loss, norm)
        elif step.skipped not in _NOT_FINITE:
            refused = step.skipped
        broken = find_broken(
            self._run,
            step.number,
            loss=step.loss,
            lr=step.lr,
            order=step.data.order,
            routers=self._routers,
            # The gradient of a loss that is not finite says nothing more.
            gradient=gradient if self._is_finite(step) else None,
            spike=spike,
            refused=refused,
            own_finite=step.sums.finite(),
            in_row=history.in_row,
        )
        if broken.is_last:
            raise broken.error()
        # All ranks know it, and one of them says so on the console.
        log.log(logging.WARNING if self._run.is_rank_0 else logging.INFO, "%s", broken.warning())
        step.grad_norm, step.history = broken.grad_norm, history.left_out()

    def record(self, step: Step, record: Record) -> None:
        """Say why the step was left out."""
        if step.skipped:
            record["skipped"] = step.skipped

    def _is_finite(self, step: Step) -> bool:
        return step.totals.finite and not self._routers

    def _spike(self, history: History, loss: float, norm: float) -> str:
        return history.spike(loss, norm, self._run.config.train.spike_sigmas)
