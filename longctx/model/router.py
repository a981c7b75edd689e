"""Which experts a token visits, and the statistics that balance them.

Axes: N tokens, M model width, E experts, k experts a token, S documents of the micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

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
    """Softmax over all experts, then the k largest; float32 in any model dtype, for rounding flips choices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))
        self.experts_per_token = config.experts_per_token
        self.normalize_gates = config.normalize_gates

    def forward(self, x_NM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gates [N, k] and probabilities [N, E] in float32, and the chosen experts [N, k]."""
        partial = accumulate_dtype(x_NM.dtype)
        probs_NE = nn.functional.linear(x_NM.to(partial), self.weight.to(partial)).softmax(-1)
        gates_Nk, experts_Nk = probs_NE.topk(self.experts_per_token, dim=-1)
        if self.normalize_gates:
            gates_Nk = gates_Nk / gates_Nk.sum(-1, keepdim=True)
        return gates_Nk, probs_NE, experts_Nk


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
