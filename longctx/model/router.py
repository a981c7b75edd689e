"""Which experts a token visits, and the statistics that balance them.

Axes: N tokens, M model width, E experts, G groups of experts, k experts a token, S documents of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.contract import accumulate_dtype


class RouterStats(NamedTuple):
    """What one layer's router did with this rank's tokens, per document; adds up over ranks."""

    counts_SE: Tensor
    """Tokens of the document that chose the expert, int64, no gradient."""
    prob_sums_SE: Tensor
    """Sum over the document's tokens of the expert's probability, float32, with gradient."""


class Router(nn.Module):
    """Scores of all experts, then the k largest; float32 in any model dtype, for rounding flips choices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E = config.num_experts
        self.config = config
        self.bias: nn.Parameter | None
        self.e_score_correction_bias: Tensor | None
        self.weight = nn.Parameter(torch.empty(E, config.hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(E)) if config.router_bias else None)
        chosen_by = torch.zeros(E) if config.selection_bias else None
        self.register_buffer("e_score_correction_bias", chosen_by)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        """As PyTorch's, but the selection bias stays float32 (float64 at least) in any model dtype."""
        before = self._buffers["e_score_correction_bias"]
        super()._apply(fn, recurse)
        after = self._buffers["e_score_correction_bias"]
        if before is not None and after is not None and after.dtype not in (torch.float32, torch.float64):
            self._buffers["e_score_correction_bias"] = before.to(after.device)
        return self

    def forward(self, x_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gates [N, k] and probabilities [N, E] in float32, and the chosen experts [N, k]."""
        partial, config = accumulate_dtype(x_NM.dtype), self.config
        bias = None if self.bias is None else self.bias.to(partial)
        logits_NE = nn.functional.linear(x_NM.to(partial), self.weight.to(partial), bias)
        scores_NE = logits_NE.softmax(-1) if config.score_function == "softmax" else logits_NE.sigmoid()
        gates_Nk, experts_Nk = self._choose(scores_NE)
        if config.normalize_gates:
            gates_Nk = gates_Nk / gates_Nk.sum(-1, keepdim=True).clamp(min=1e-20)
        if config.routed_scale != 1:
            gates_Nk = gates_Nk * config.routed_scale
        if config.score_function == "sigmoid":
            scores_NE = scores_NE / scores_NE.sum(-1, keepdim=True).clamp(min=1e-20)
        return gates_Nk, scores_NE, experts_Nk

    def _choose(self, scores_NE: Tensor) -> tuple[Tensor, Tensor]:
        config, biased_NE = self.config, scores_NE.detach()
        if self.e_score_correction_bias is not None:
            biased_NE = biased_NE + self.e_score_correction_bias
        if config.groups_per_token < config.expert_groups:
            biased_NE = within_best_groups(
                biased_NE, config.expert_groups, config.groups_per_token, best_of=2 if config.selection_bias else 1
            )
        experts_Nk = biased_NE.topk(config.experts_per_token, dim=-1).indices
        return scores_NE.gather(-1, experts_Nk), experts_Nk


def within_best_groups(scores_NE: Tensor, groups: int, kept: int, *, best_of: int) -> Tensor:
    """Scores with −inf outside of each token's ``kept`` best groups, a group being the sum of its ``best_of`` best."""
    scores_NGe = scores_NE.unflatten(-1, (groups, -1))
    best_NG = scores_NGe.topk(best_of, dim=-1).values.sum(-1)
    inside_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter_(1, best_NG.topk(kept, dim=-1).indices, True)
    return scores_NGe.masked_fill(~inside_NG.unsqueeze(-1), -torch.inf).flatten(-2)


def router_stats(
    probs_NE: Tensor, experts_Nk: Tensor, documents_N: Tensor, num_documents: int
) -> tuple[Tensor, Tensor]:
    """``counts_SE`` and ``prob_sums_SE`` of these tokens; padding (a negative document) is in neither."""
    E = probs_NE.shape[-1]
    rows_N = documents_N.where(documents_N >= 0, num_documents)  # padding lands in a last row that is cut off
    slots = (rows_N[:, None] * E + experts_Nk).flatten()
    counts = slots.new_zeros((num_documents + 1) * E).scatter_add_(0, slots, torch.ones_like(slots))
    sums = probs_NE.new_zeros(num_documents + 1, E)
    sums = sums.index_put((rows_N,), probs_NE, accumulate=True)  # unlike index_add, in fixed order on every device
    return counts.view(-1, E)[:-1], sums[:-1]
