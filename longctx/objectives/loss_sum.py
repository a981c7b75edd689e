"""LossSum and the Objective protocol."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class LossSum(NamedTuple):
    """Sums over this rank's tokens; divided by the step's global token count they are the step's losses."""

    objective_sum: Tensor
    """What the targets that count cost: negative log-likelihood, of smoothed labels, plus z-loss; float32 scalar with
    gradient."""
    balance_sum: Tensor
    """Load-balance loss, summed over layers and tokens, float32 scalar with gradient; before its weight."""
    z_sum: Tensor
    """Router z-loss, summed over layers and tokens, float32 scalar, with gradient if the model's config gives it a
    weight; before that."""
    counts_LE: Tensor
    """This rank's tokens by layer and expert, padding excluded, int64; [0, 0] in a dense model."""
    facts_L4: Tensor
    """What the routers tell of themselves by layer, float64: ``RouterStats.facts_4``; [0, 4] in a dense model."""
    nll_sum: Tensor
    """Plain negative log-likelihood of the targets that count, to be reported: float32 scalar without gradient."""

    def total(self, balance_loss_weight: float, router_z_loss_weight: float = 0.0) -> Tensor:
        """The sum to differentiate."""
        return self.objective_sum + balance_loss_weight * self.balance_sum + router_z_loss_weight * self.z_sum
