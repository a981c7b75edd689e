"""One decoder layer.

Axes: B rows, t tokens of this rank, M model width, H heads, D head size, S documents, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from longctx.config import ModelConfig
from longctx.model.attention import Attention
from longctx.model.cores import AttentionCore, AttentionMask, KVCache
from longctx.model.mlp import SwiGLU
from longctx.model.moe import MixtureOfExperts
from longctx.model.norms import RMSNorm


class Block(nn.Module):
    """x + attention(norm(x)), then x + ffn(norm(x))."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.input_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, eps=config.norm_eps)
        self.mlp = MixtureOfExperts(config) if config.num_experts else SwiGLU(config.hidden_size, config.ffn_size)

    def forward(
        self,
        x_BtM: Tensor,
        *,
        rotary: tuple[Tensor, Tensor],
        mask: AttentionMask,
        core: AttentionCore,
        cache: KVCache | None,
        documents_Bt: Tensor | None,
        recompute: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The layer's output [B, t, M] and its router's ``counts_SE`` and ``prob_sums_SE`` (empty if none).

        With ``recompute`` only x and what the core keeps survive until backward; the core itself, and with it the
        communication between ranks, runs once.
        """
        run = _recomputed if recompute and torch.is_grad_enabled() else _called
        q, k, v = run(self._before_core, x_BtM, *rotary)
        heads_BtHD = core(q, k, v, mask=mask, layer=self.layer, cache=cache)
        return run(self._after_core, x_BtM, heads_BtHD, documents_Bt, len(mask.cu_seqlens) - 1)

    def _before_core(self, x_BtM: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.self_attn.project(self.input_layernorm(x_BtM), cos, sin)

    def _after_core(
        self, x_BtM: Tensor, heads_BtHD: Tensor, documents_Bt: Tensor | None, num_documents: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        x_BtM = x_BtM + self.self_attn.output(heads_BtHD)
        normed_BtM = self.post_attention_layernorm(x_BtM)
        if isinstance(self.mlp, SwiGLU):
            nothing = normed_BtM.new_zeros(0, 0, dtype=torch.float32)
            return x_BtM + self.mlp(normed_BtM), nothing.long(), nothing
        out_BtM, counts_SE, prob_sums_SE = self.mlp(normed_BtM, documents_Bt=documents_Bt, num_documents=num_documents)
        return x_BtM + out_BtM, counts_SE, prob_sums_SE


def _called(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> Any:
    return function(*args)


def _recomputed(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> Any:
    # No random numbers are drawn in a block, so there is no generator state to carry to the second run.
    return checkpoint(function, *args, use_reentrant=False, preserve_rng_state=False)
