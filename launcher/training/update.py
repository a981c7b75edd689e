"""``Update``: take an optimiser step, or leave it out on every rank where it is not finite or a spike."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from launcher.training.broken_step import find_broken
from launcher.training.history import History
from launcher.training.run import Run
from launcher.training.totals import StepSums, StepTotals
from longctx.errors import GradientError

log = logging.getLogger(__name__)

Skipped = Literal["", "loss", "router", "gradient", "spike"]
"""Why a step was left out; empty of one that was taken."""


class Updated(NamedTuple):
    """What became of an update."""

    grad_norm: float | None
    """Before clipping; None where the loss says already that the step is left out."""
    skipped: Skipped
    history: History
    """With this step."""


@dataclass(frozen=True, kw_only=True)
class Update:
    """The end of one step: its gradients are there, and nothing has changed yet."""

    run: Run
    step: int
    loss: float
    lr: float
    order: dict[str, Any]
    """The loader's state before the step."""
    history: History

    def take(self, own: StepSums, totals: StepTotals) -> Updated:
        """Update weights and moments, or leave them as they are.

        ``own`` is this rank's part of ``totals``. TrainingError where ``train.skip_steps`` were left out right before,
        or where weights are no numbers already: no step can be taken then. Collective, the same on every rank.
        """
        run = self.run
        routers = totals.broken_routers(run.expert_layers)
        is_finite = totals.finite and not routers
        try:
            norm = run.engine.step(self.lr, lambda norm: is_finite and not self._spike(norm))
        except GradientError as error:
            norm, gradient = error.norm, error
        else:
            return Updated(norm, "", self.history.taken(self.loss, norm))
        why, spike = self._why(totals, routers, norm)
        if not is_finite:
            # The gradient of such a loss says nothing more.
            gradient = None
        broken = find_broken(
            run,
            self.step,
            loss=self.loss,
            lr=self.lr,
            order=self.order,
            routers=routers,
            gradient=gradient,
            spike=spike,
            own_finite=own.finite(),
            in_row=self.history.in_row,
        )
        if broken.is_last:
            raise broken.error()
        # All ranks know it, and one of them says so on the console.
        log.log(logging.WARNING if run.is_rank_0 else logging.INFO, "%s", broken.warning())
        return Updated(broken.grad_norm, why, self.history.left_out())

    def _why(self, totals: StepTotals, routers: Sequence[str], norm: float) -> tuple[Skipped, str]:
        """Why the step is left out; of a spike, in words by how much."""
        if routers:
            return "router", ""
        if not totals.finite:
            return "loss", ""
        if not math.isfinite(norm):
            return "gradient", ""
        return "spike", self._spike(norm)

    def _spike(self, norm: float) -> str:
        return self.history.spike(self.loss, norm, self.run.config.train.spike_sigmas)
