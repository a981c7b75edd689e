"""The projections around an attention core: queries, keys and values with their positions, and the way back.

Both kinds have ``project``, ``sinks`` and ``output``; the block calls the core, which it is handed, in between.

Axes: B rows, t tokens of this rank, M model width, H query heads, K key/value heads, D query/key head size, V value
head size, R rotated channels, P channels of relative positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.config import ModelConfig
from longctx.model.layers.linear import Linear, Weight
from longctx.model.layers.norms import RMSNorm, build_norm
from longctx.model.positions import apply_rotary

Table = tuple[Tensor, Tensor]
"""Cosines and sines of this rank's positions."""

_LATENT_EPS = 1e-6
"""Epsilon of the norms in latents, whatever the model's: DeepSeek's code leaves them at this."""


def build_attention(config: ModelConfig, layer: int) -> GroupedQueryAttention | LatentAttention:
    """The layer's projections."""
    return LatentAttention(config, layer) if config.is_latent else GroupedQueryAttention(config, layer)


class GroupedQueryAttention(nn.Module):
    """A projection each for queries, keys and values; K = H is multi-head, K = 1 multi-query attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        M, D, H, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        self.head_dim, self.qk_norm = D, config.qk_norm
        self.interleaved = config.rope_of(layer).interleaved
        self.q_proj = Linear(M, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.v_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, M, bias=config.o_bias)
        if config.qk_norm != "none":
            whole = config.qk_norm == "full"
            self.q_norm = build_norm(config, H * D if whole else D)
            self.k_norm = build_norm(config, K * D if whole else D)
        self.relative = RelativePositions(config) if config.position == "relative" else None
        self.sinks = Weight(H) if config.sinks and config.layer_kind(layer) != "linear" else None

    def project(self, x_BtM: Tensor, table: Table | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, t, H, D], keys [B, t, K, D] and values [B, t, K, V], positions in the first two.

        With relative positions queries and keys are wider than D.
        """
        q, k, v = self.q_proj(x_BtM), self.k_proj(x_BtM), self.v_proj(x_BtM)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if self.relative is not None and table is not None:
            return *self.relative(q, k, *table), v
        if table is not None:
            q, k = (apply_rotary(x, *table, interleaved=self.interleaved) for x in (q, k))
        return q, k, v

    def output(self, heads_BtHV: Tensor) -> Tensor:
        """The heads' outputs mixed back to the model width [B, t, M]."""
        return self.o_proj(heads_BtHV.flatten(-2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434 §2.1): heads unfold from narrow latents of queries and of keys.

    A key is what its head unfolds, beside rotated channels that all heads share.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        M, H, D, V = config.hidden_size, config.num_heads, config.head_dim, config.value_dim
        self.num_heads, self.turned, self.value_dim = H, config.rope_head_dim, V
        self.interleaved = config.rope_of(layer).interleaved
        if config.q_lora_rank:
            self.q_a_proj = Linear(M, config.q_lora_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=_LATENT_EPS, offset=config.norm_offset)
            self.q_b_proj = Linear(config.q_lora_rank, H * D, bias=False)
        else:
            self.q_proj = Linear(M, H * D, bias=False)
        self.kv_lora_rank = config.kv_lora_rank
        self.kv_a_proj_with_mqa = Linear(M, config.kv_lora_rank + self.turned, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=_LATENT_EPS, offset=config.norm_offset)
        self.kv_b_proj = Linear(config.kv_lora_rank, H * (D - self.turned + V), bias=False)
        self.o_proj = Linear(H * V, M, bias=config.o_bias)
        self.sinks = Weight(H) if config.sinks else None

    def project(self, x_BtM: Tensor, table: Table | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, t, H, D], values [B, t, H, V]; a head's last channels turn."""
        unfolded = self.q_proj(x_BtM) if hasattr(self, "q_proj") else self.q_b_proj(self._query_latent(x_BtM))
        q_BtHD = unfolded.unflatten(-1, (self.num_heads, -1))
        kept = q_BtHD.shape[-1] - self.turned
        latent, shared = self.kv_a_proj_with_mqa(x_BtM).split((self.kv_lora_rank, self.turned), dim=-1)
        unfolded = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(-1, (self.num_heads, -1))
        k_BtHN, v_BtHV = unfolded.split((kept, self.value_dim), dim=-1)
        q_BtHN, q_BtHR = q_BtHD.split((kept, self.turned), dim=-1)
        k_Bt1R = shared.unsqueeze(-2)
        if table is not None:
            q_BtHR, k_Bt1R = (apply_rotary(x, *table, interleaved=self.interleaved) for x in (q_BtHR, k_Bt1R))
        q = torch.cat((q_BtHN, q_BtHR), dim=-1)
        k = torch.cat((k_BtHN, k_Bt1R.expand_as(q_BtHR)), dim=-1)
        return q, k, v_BtHV

    def output(self, heads_BtHV: Tensor) -> Tensor:
        """The heads' outputs mixed back to the model width [B, t, M]."""
        return self.o_proj(heads_BtHV.flatten(-2))

    def _query_latent(self, x_BtM: Tensor) -> Tensor:
        return self.q_a_layernorm(self.q_a_proj(x_BtM))


class RelativePositions(nn.Module):
    """Transformer-XL's scores (q + u)·k + (q + v)·W·r(i − j), r being sinusoids (arXiv 1901.02860 §3.3).

    sin and cos of i − j are sums of products of those of i and of j, so the second term is a dot product too, of
    channels that a query has from q and i and a key from j alone. Any kernel, and any ring, then computes it exactly.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        H, D, P = config.num_heads, config.head_dim, config.hidden_size
        self.content_bias = nn.Parameter(torch.empty(H, D))
        self.position_bias = nn.Parameter(torch.empty(H, D))
        self.weight = nn.Parameter(torch.empty(H, D, P))

    def forward(self, q_BtHD: Tensor, k_BtKD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries [B, t, H, D + P] and keys [B, t, K, D + P]; the table is [B, t, P/2]."""
        wanted_BtHP = _HeadProduct.apply(q_BtHD + self.position_bias, self.weight)
        of_sin, of_cos = wanted_BtHP.to(cos.dtype).chunk(2, dim=-1)
        cos_i, sin_i = cos.unsqueeze(-2), sin.unsqueeze(-2)
        meets_cos, meets_sin = of_sin * sin_i + of_cos * cos_i, of_cos * sin_i - of_sin * cos_i
        q = torch.cat((q_BtHD + self.content_bias, meets_cos.to(q_BtHD.dtype), meets_sin.to(q_BtHD.dtype)), dim=-1)
        places = torch.cat((cos_i, sin_i), dim=-1).to(k_BtKD.dtype)
        return q, torch.cat((k_BtKD, places.expand(-1, -1, k_BtKD.shape[2], -1)), dim=-1)


class _HeadProduct(torch.autograd.Function):
    """[B, t, H, D] times each head's [D, P]. Saves the parameter itself and no view of it, as einsum would: ZeRO-3
    frees a gathered weight by emptying the parameter, and a view would hold it until backward."""

    @staticmethod
    def forward(ctx: Any, x_BtHD: Tensor, weight_HDP: Tensor) -> Tensor:
        ctx.save_for_backward(x_BtHD, weight_HDP)
        return torch.einsum("bthd,hdp->bthp", x_BtHD, weight_HDP)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_BtHP: Tensor):  # type: ignore[override]
        x_BtHD, weight_HDP = ctx.saved_tensors
        dx_BtHD = torch.einsum("bthp,hdp->bthd", dy_BtHP, weight_HDP)
        return dx_BtHD, torch.einsum("bthd,bthp->hdp", x_BtHD, dy_BtHP)
