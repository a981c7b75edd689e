"""``LossSum``: what an objective returns of one micro-batch on one rank."""

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
        # Flat: the diagnostics follow the five others.
        return tuple(self[:5]) + tuple(self.diagnostics)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> LossSum:
        """The inverse of ``tensors``: what ``CausalLM`` returned."""
        # In the order of the fields; what is left are the routers' diagnostics.
        objective_sum, balance_sum, z_sum, counts_LE, nll_sum = tensors[:5]
        return cls(objective_sum, balance_sum, z_sum, counts_LE, nll_sum, RouterDiagnostics._make(tensors[5:]))
