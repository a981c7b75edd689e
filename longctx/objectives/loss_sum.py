"""LossSum and the Objective protocol."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from longctx.model.experts.router import RouterDiagnostics


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
    nll_sum: Tensor
    """Plain negative log-likelihood of the targets that count, to be reported: float32 scalar without gradient."""
    diagnostics: RouterDiagnostics
    """Of the routers, each [L]; [0] in a dense model."""

    def tensors(self) -> tuple[Tensor, ...]:
        """All of them in a plain tuple, the only kind that ZeRO-3's hooks look into."""
        return (self.objective_sum, self.balance_sum, self.z_sum, self.counts_LE, self.nll_sum, *self.diagnostics)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> LossSum:
        """The inverse of ``tensors``: what ``CausalLM`` returned."""
        objective_sum, balance_sum, z_sum, counts_LE, nll_sum = tensors[:5]
        return cls(objective_sum, balance_sum, z_sum, counts_LE, nll_sum, RouterDiagnostics._make(tensors[5:]))

    def total(self, balance_loss_weight: float, router_z_loss_weight: float = 0.0) -> Tensor:
        """The sum to differentiate."""
        return self.objective_sum + balance_loss_weight * self.balance_sum + router_z_loss_weight * self.z_sum
