"""Next-token prediction with balanced experts: the one module that is trained.

Axes: B rows, t tokens of this rank, L layers, S documents of the micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn

from longctx.batch import Batch
from longctx.model.decoder import Decoder
from longctx.model.router import RouterStats


class LossSum(NamedTuple):
    """Sums over this rank's tokens; divided by the step's global token count they are the step's losses."""

    objective_sum: Tensor
    """What the targets that count cost: negative log-likelihood, of smoothed labels, plus z-loss; float32 scalar with
    gradient."""
    balance_sum: Tensor
    """Load-balance loss, summed over layers and documents, float32 scalar with gradient; before its weight."""
    counts_LE: Tensor
    """This rank's tokens by layer and expert, padding excluded, int64; [0, 0] in a dense model."""
    nll_sum: Tensor
    """Plain negative log-likelihood of the targets that count, to be reported: float32 scalar without gradient."""

    def total(self, balance_loss_weight: float) -> Tensor:
        """The sum to differentiate."""
        return self.objective_sum + balance_loss_weight * self.balance_sum


def identity(counts_LSE: Tensor) -> Tensor:
    """What one process's counts add up to over the ranks that share its sequence."""
    return counts_LSE


class CausalLM(nn.Module):
    """Decoder and objective in one forward, so that ZeRO-3 sees every use of a parameter."""

    def __init__(
        self,
        decoder: Decoder,
        reduce_counts: Callable[[Tensor], Tensor] = identity,
        *,
        z_loss: float = 0.0,
        label_smoothing: float = 0.0,
    ) -> None:
        """``reduce_counts`` sums int64 counts [L, S, E] over the ranks that share a sequence; called once a micro-batch
        of an expert model, on every rank, also on one that holds no token of it. The other two are ``LossOptions``'."""
        super().__init__()
        self.decoder = decoder
        self.reduce_counts = reduce_counts
        self.z_loss, self.label_smoothing = z_loss, label_smoothing

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The fields of ``LossSum``, as the plain tuple that ZeRO-3's hooks can look into."""
        hidden_BtM, stats = self._run(batch, return_stats=True)
        objective_sum, nll_sum = self.decoder.loss_sums(
            hidden_BtM, batch.targets, z_loss=self.z_loss, label_smoothing=self.label_smoothing
        )
        if not stats:
            return objective_sum, torch.zeros_like(nll_sum), batch.tokens.new_zeros(0, 0), nll_sum
        counts_LSE = torch.stack([layer.counts_SE for layer in stats])
        counts_LE = counts_LSE.sum(1)
        return objective_sum, balance_sum(stats, self.reduce_counts(counts_LSE)), counts_LE, nll_sum

    @torch.no_grad()
    def token_nll(self, batch: Batch) -> Tensor:
        """Each token's negative log-likelihood [B, t], float32, without gradient; 0 where the target is ignored."""
        return self.decoder.token_nll(self._run(batch, return_stats=False), batch.targets)

    def _run(self, batch: Batch, *, return_stats: bool):
        return self.decoder(
            batch.tokens,
            batch.positions,
            batch.cu_seqlens,
            documents=batch.documents,
            return_stats=return_stats,
        )


def balance_sum(stats: list[RouterStats], counts_LSE: Tensor) -> Tensor:
    """Σ over layers and documents of E / (k · n_s) · Σ_e counts[s, e] · prob_sums[s, e].

    Counts are those of whole documents, over all ranks that share the sequence; probabilities are this rank's. Summed
    over ranks it is Σ n_s · (document's balance loss), and 1 a token when the experts are equally loaded. k · n_s is
    the row sum of the counts; a document without a token contributes 0.
    """
    prob_sums_LSE = torch.stack([layer.prob_sums_SE for layer in stats])
    routed_LS = counts_LSE.sum(-1).clamp(min=1)
    scores_LS = (counts_LSE.to(prob_sums_LSE.dtype) * prob_sums_LSE).sum(-1)
    return (scores_LS / routed_LS).sum() * counts_LSE.shape[-1]
