"""The projections around an attention core: queries, keys and values with their positions, and the way back.

Both kinds have ``project``, ``sinks`` and ``output``; the block calls the core, which it is handed, in between. Both
functions are told whether a cache is to store the keys: those of latent attention are then the latents.

Axes: B rows, t tokens of this rank, M model width, H query heads, K key/value heads, D query/key head size, V value
head size, R rotary channels, N channels without positions, P channels of relative positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.config import ModelConfig
from longctx.model.layers.linear import Linear, Weight
from longctx.model.layers.norms import RMSNorm, build_norm
from longctx.model.rotary import RotaryTable, apply_rotary_to_both

_LATENT_EPS = 1e-6
"""Epsilon of the norms in latents, whatever the model's: DeepSeek's code leaves them at this."""


def build_attention(config: ModelConfig, layer: int) -> GroupedQueryAttention | LatentAttention:
    """The layer's projections."""
    if config.is_latent:
        return LatentAttention(config, layer)
    return GroupedQueryAttention(config, layer)


class GroupedQueryAttention(nn.Module):
    """A projection each for queries, keys and values; K = H is multi-head, K = 1 multi-query attention."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        M, D, H, K = config.hidden_size, config.head_dim, config.num_heads, config.num_kv_heads
        self.num_heads, self.num_kv_heads, self.head_dim = H, K, D
        self.qk_norm = config.qk_norm
        self.interleaved = config.rope_of(layer).interleaved
        self.q_proj = Linear(M, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.v_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, M, bias=config.o_bias)
        # A full norm is one over the channels of all heads (OLMoE), the other one over those of each head (Qwen 3).
        if config.qk_norm == "full":
            self.q_norm = build_norm(config, H * D)
            self.k_norm = build_norm(config, K * D)
        elif config.qk_norm != "none":
            self.q_norm = build_norm(config, D)
            self.k_norm = build_norm(config, D)
        self.relative = None
        if config.position == "relative":
            self.relative = RelativePositions(config)
        # A sink is a logit of the softmax, which linear layers do not have.
        self.sinks = None
        if config.sinks and config.layer_kind(layer) != "linear":
            self.sinks = Weight(H)

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, t, H, D], keys [B, t, K, D] and values [B, t, K, V], positions in the first two.

        With relative positions queries and keys are wider than D. With ``only_graph`` what no backward reads is NaN.
        """
        # Norms read both, and relative positions are a product with the queries.
        skips = only_graph and self.qk_norm == "none" and self.relative is None
        q, k = self.q_proj(x_BtM, only_graph=skips), self.k_proj(x_BtM, only_graph=skips)
        v = self.v_proj(x_BtM, only_graph=only_graph)
        if self.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        B, t, H, K, D = x_BtM.shape[0], x_BtM.shape[1], self.num_heads, self.num_kv_heads, self.head_dim
        q, k, v = q.view(B, t, H, D), k.view(B, t, K, D), v.view(B, t, K, D)
        if self.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if table is None:
            return q, k, v
        # Positions come after the norm: rotation keeps a normed head's length.
        if self.relative is not None:
            q, k = self.relative(q, k, table.cos, table.sin)
        else:
            q, k = apply_rotary_to_both(q, k, table, interleaved=self.interleaved, only_graph=only_graph)
        return q, k, v

    def output(self, heads_BtHV: Tensor, *, cached: bool) -> Tensor:
        """The heads' outputs mixed back to the model width [B, t, M]."""
        return self.o_proj(heads_BtHV.flatten(-2))


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434 §2.1): heads unfold from narrow latents of queries and of keys.

    A key is what its head unfolds, beside rotated channels that all heads share. A cache stores no unfolded keys but
    the latents: queries are folded instead, so that all heads share one key, whose first channels are its value.
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__()
        M, H, D, V = config.hidden_size, config.num_heads, config.head_dim, config.value_dim
        R = config.rope_head_dim
        self.num_heads = H
        self.rope_head_dim = R
        self.value_dim = V
        self.interleaved = config.rope_of(layer).interleaved
        # The smaller models of the family project queries directly, without a latent (DeepSeek-V2-Lite).
        self.q_lora_rank = config.q_lora_rank
        if config.q_lora_rank:
            self.q_a_proj = Linear(M, config.q_lora_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=_LATENT_EPS, offset=config.norm_offset)
            self.q_b_proj = Linear(config.q_lora_rank, H * D, bias=False)
        else:
            self.q_proj = Linear(M, H * D, bias=False)
        self.kv_lora_rank = config.kv_lora_rank
        # One product gives the latent and the rotary channels of the keys, which all heads share.
        self.kv_a_proj_with_mqa = Linear(M, config.kv_lora_rank + R, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=_LATENT_EPS, offset=config.norm_offset)
        self.kv_b_proj = Linear(config.kv_lora_rank, H * (D - R + V), bias=False)
        self.o_proj = Linear(H * V, M, bias=config.o_bias)
        self.sinks = None
        if config.sinks:
            self.sinks = Weight(H)

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, t, H, D], values [B, t, H, V]; a head's last channels are rotary.

        With ``only_graph`` what no backward reads is NaN. For a cache queries [B, t, H, C + R], keys [B, t, 1, C + R],
        and their first C channels as values.
        """
        q_BtHD = self._queries(x_BtM, only_graph=only_graph).unflatten(-1, (self.num_heads, -1))
        N, R = q_BtHD.shape[-1] - self.rope_head_dim, self.rope_head_dim
        latent, k_BtR = self.kv_a_proj_with_mqa(x_BtM).split((self.kv_lora_rank, R), dim=-1)
        latent_BtC = self.kv_a_layernorm(latent)
        q_BtHN, q_BtHR = q_BtHD.split((N, R), dim=-1)
        k_Bt1R = k_BtR.unsqueeze(-2)
        # Keys are rotated before they are repeated for the heads: once a token, not once a head.
        if table is not None:
            q_BtHR, k_Bt1R = apply_rotary_to_both(
                q_BtHR, k_Bt1R, table, interleaved=self.interleaved, only_graph=only_graph
            )
        if cached:
            # q·(W latent) = (q W)·latent: the product with W moves from every key to the query.
            q_BtHC = torch.einsum("bthn,hnc->bthc", q_BtHN, self._unfolding()[:, :N])
            k = torch.cat((latent_BtC.unsqueeze(-2), k_Bt1R), dim=-1)
            return torch.cat((q_BtHC, q_BtHR), dim=-1), k, k[..., : self.kv_lora_rank]
        unfolded = self.kv_b_proj(latent_BtC, only_graph=only_graph).unflatten(-1, (self.num_heads, -1))
        k_BtHN, v_BtHV = unfolded.split((N, self.value_dim), dim=-1)
        q = torch.cat((q_BtHN, q_BtHR), dim=-1)
        k = torch.cat((k_BtHN, k_Bt1R.expand_as(q_BtHR)), dim=-1)
        return q, k, v_BtHV

    def output(self, heads_BtHV: Tensor, *, cached: bool) -> Tensor:
        """The heads' outputs mixed back to the model width [B, t, M]; for a cache, outputs [B, t, H, C] are latents."""
        if cached:
            heads_BtHV = torch.einsum("bthc,hvc->bthv", heads_BtHV, self._unfolding()[:, -self.value_dim :])
        return self.o_proj(heads_BtHV.flatten(-2))

    def _unfolding(self) -> Tensor:
        """What unfolds a latent to each head's key and value, [H, N + V, C]."""
        return self.kv_b_proj.weight.unflatten(0, (self.num_heads, -1))

    def _queries(self, x_BtM: Tensor, *, only_graph: bool) -> Tensor:
        if not self.q_lora_rank:
            return self.q_proj(x_BtM, only_graph=only_graph)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BtM)), only_graph=only_graph)


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
        factors_BtHP = _HeadProduct.apply(q_BtHD + self.position_bias, self.weight)
        # The factors a of sin(i − j) and b of cos(i − j) are formed in the table's dtype, as the angles are.
        a, b = factors_BtHP.to(cos.dtype).chunk(2, dim=-1)
        cos_i, sin_i = cos.unsqueeze(-2), sin.unsqueeze(-2)
        # a·sin(i − j) + b·cos(i − j) = (a·sin i + b·cos i)·cos j + (b·sin i − a·cos i)·sin j
        of_cos_j = a * sin_i + b * cos_i
        of_sin_j = b * sin_i - a * cos_i
        q = torch.cat((q_BtHD + self.content_bias, of_cos_j.to(q_BtHD.dtype), of_sin_j.to(q_BtHD.dtype)), dim=-1)
        # What a key has of its position is the same in all heads.
        position_Bt1P = torch.cat((cos_i, sin_i), dim=-1).to(k_BtKD.dtype)
        k = torch.cat((k_BtKD, position_Bt1P.expand(-1, -1, k_BtKD.shape[2], -1)), dim=-1)
        return q, k


class _HeadProduct(torch.autograd.Function):
    """[B, t, H, D] times each head's [D, P].

    Saves the parameter itself and no view of it, as einsum would: ZeRO-3 frees a gathered weight by emptying the
    parameter, and a view would hold it until backward.
    """

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
