"""One decoder layer.

Axes: B rows, t tokens of this rank, M model width, H heads, D head size, S documents, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.model.attention import Attention
from longctx.model.cores import AttentionCore, AttentionMask, KVCache
from longctx.model.mlp import SwiGLU
from longctx.model.moe import MixtureOfExperts
from longctx.model.norms import RMSNorm
from longctx.model.stash import Stash, recomputed, recomputed_in_graph


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

        With ``recompute`` only x and the core's result survive until backward, which computes the rest anew; the core's
        work, and with it the communication between ranks, is done once.
        """
        run = _once
        if recompute and cache is None and torch.is_grad_enabled():
            in_graph = torch.compiler.is_compiling() and getattr(core, "is_operator", False)
            run = recomputed_in_graph if in_graph else recomputed
        return run(self._run, x_BtM, *rotary, mask, core, cache, documents_Bt)

    def _run(
        self,
        x_BtM: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: AttentionMask,
        core: AttentionCore,
        cache: KVCache | None,
        documents_Bt: Tensor | None,
        stash: Stash | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.self_attn.project(self.input_layernorm(x_BtM), cos, sin)
        attend = core if stash is None else partial(core, stash=stash)
        heads_BtHD = attend(q, k, v, mask=mask, layer=self.layer, cache=cache)
        return self._after_core(x_BtM, heads_BtHD, documents_Bt, mask.num_documents)

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


def _once(function: Callable[..., tuple[Tensor, ...]], *args: Any) -> Any:
    return function(*args, None)
