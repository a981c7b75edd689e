"""The mixture-of-experts FFN: router, routed experts, and an expert that all tokens share.

Axes: B rows, t tokens of this rank, N = B·t, M model width, E experts, S documents of the micro-batch.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.dispatch import ExpertRun
from longctx.model.experts import Experts
from longctx.model.layers import Linear
from longctx.model.mlp import FeedForward
from longctx.model.router import Router, router_stats


class MixtureOfExperts(nn.Module):
    """Dropless: every token visits its k experts, whatever the load."""

    def __init__(self, config: ModelConfig, share: slice = slice(None)) -> None:
        super().__init__()
        self.gate = Router(config)
        self.experts = Experts(config, share)
        self.has_shared_expert = config.shared_ffn_size > 0
        if self.has_shared_expert:
            self.shared_expert = FeedForward(config, config.shared_ffn_size)
        self.has_shared_gate = self.has_shared_expert and config.shared_gate
        if self.has_shared_gate:
            self.shared_expert_gate = Linear(config.hidden_size, 1, bias=False)

    def forward(
        self,
        x_BtM: Tensor,
        *,
        documents_Bt: Tensor | None = None,
        num_documents: int = 0,
        run: ExpertRun | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Output [B, t, M], and the router's ``counts_SE`` and ``prob_sums_SE`` (S = 0 without ``documents_Bt``)."""
        x_NM = x_BtM.flatten(0, 1)
        gates_Nk, probs_NE, experts_Nk = self.gate(x_NM)
        out_NM = self.experts(x_NM, gates_Nk, experts_Nk, run)
        if self.has_shared_expert:
            shared_NM = self.shared_expert(x_NM)
            if self.has_shared_gate:
                shared_NM = torch.sigmoid(self.shared_expert_gate(x_NM)) * shared_NM
            out_NM = out_NM + shared_NM
        out_BtM = out_NM.to(x_BtM.dtype).view_as(x_BtM)
        if documents_Bt is None:
            return out_BtM, experts_Nk.new_zeros(0, probs_NE.shape[1]), probs_NE[:0]
        return out_BtM, *router_stats(probs_NE, experts_Nk, documents_Bt.flatten(), num_documents)
