"""Projections for multi-head latent attention.

Axes: B rows, t tokens of this rank, M model width, H heads, D query/key head size, V value head size, R rotary
channels, N channels without positions, C latent channels for keys and values.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.architecture.layer_specs import LayerSpec
from longctx.architecture.mixers.mixer import Mixer
from longctx.config import ModelConfig
from longctx.model.layers.linear import Linear, Weight
from longctx.model.layers.norms import RMSNorm
from longctx.model.mixers.network import Heads
from longctx.model.rotary import RotaryTable, apply_rotary_to_both

_LATENT_EPS = 1e-6
"""Epsilon for the latents' norms, whatever the model's: DeepSeek's code leaves them at this."""


class LatentAttention(nn.Module):
    """Multi-head latent attention (arXiv 2405.04434 §2.1): heads unfold from narrow latents for queries and for keys.

    A key has channels that its head unfolds, and rotated channels that all heads share. A cache stores latents instead
    of unfolded keys: queries are folded, so that all heads share one key. Its first channels are the value.
    """

    gates_output = False

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        M, H, D, V = config.hidden_size, config.num_heads, config.head_dim, config.value_dim
        R = config.rope_head_dim
        self.num_heads = H
        self.rope_head_dim = R
        self.value_dim = V
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        # The family's smaller models project queries directly, without a latent (DeepSeek-V2-Lite).
        self.q_lora_rank = config.q_lora_rank
        if config.q_lora_rank:
            self.q_a_proj = Linear(M, config.q_lora_rank, bias=config.qkv_bias)
            self.q_a_layernorm = RMSNorm(config.q_lora_rank, eps=_LATENT_EPS, offset=config.norm_offset)
            self.q_b_proj = Linear(config.q_lora_rank, H * D, bias=False)
        else:
            self.q_proj = Linear(M, H * D, bias=False)
        self.kv_lora_rank = config.kv_lora_rank
        # One matmul gives the latent and the keys' rotary channels, which all heads share.
        self.kv_a_proj_with_mqa = Linear(M, config.kv_lora_rank + R, bias=config.qkv_bias)
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, eps=_LATENT_EPS, offset=config.norm_offset)
        self.kv_b_proj = Linear(config.kv_lora_rank, H * (D - R + V), bias=False)
        self.o_proj = Linear(H * V, M, bias=config.o_bias)
        self.sinks = None
        if config.sinks:
            self.sinks = Weight(H)

    def core_weights(self) -> tuple[Tensor, ...]:
        """Return the sinks, one logit per head; empty if the model has no sinks."""
        return () if self.sinks is None else (self.sinks(),)

    @staticmethod
    def heads(config: ModelConfig, mixer: Mixer, *, cached: bool) -> Heads:
        """Return the head counts and sizes that ``project`` produces: for a cache latents, which all heads share."""
        if cached:
            return Heads(
                config.num_heads,
                1,
                config.kv_lora_rank + config.rope_head_dim,
                config.kv_lora_rank,
                values_in_keys=True,
            )
        # Each head unfolds its own key and value.
        return Heads(config.num_heads, config.num_heads, config.head_dim, config.value_dim)

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries and keys [B, t, H, D], values [B, t, H, V]; a head's last channels are rotary.

        With ``only_graph`` values that no backward reads are NaN. For a cache, return queries [B, t, H, C + R], keys
        [B, t, 1, C + R], and their first C channels as values.
        """
        q_BtHD = self._queries(x_BtM, only_graph=only_graph).unflatten(-1, (self.num_heads, -1))
        N, R = q_BtHD.shape[-1] - self.rope_head_dim, self.rope_head_dim
        latent, k_BtR = self.kv_a_proj_with_mqa(x_BtM).split((self.kv_lora_rank, R), dim=-1)
        latent_BtC = self.kv_a_layernorm(latent)
        q_BtHN, q_BtHR = q_BtHD.split((N, R), dim=-1)
        k_Bt1R = k_BtR.unsqueeze(-2)
        # Keys are rotated before they are repeated for the heads: once per token, not once per head.
        if table is not None:
            q_BtHR, k_Bt1R = apply_rotary_to_both(
                q_BtHR, k_Bt1R, table, interleaved=self.interleaved, only_graph=only_graph
            )
        if cached:
            # q·(W latent) = (q W)·latent: the matmul with W moves from every key to the query.
            q_BtHC = torch.einsum("bthn,hnc->bthc", q_BtHN, self._unfolding(x_BtM.dtype)[:, :N])
            k = torch.cat((latent_BtC.unsqueeze(-2), k_Bt1R), dim=-1)
            return torch.cat((q_BtHC, q_BtHR), dim=-1), k, k[..., : self.kv_lora_rank]
        unfolded = self.kv_b_proj(latent_BtC, only_graph=only_graph).unflatten(-1, (self.num_heads, -1))
        k_BtHN, v_BtHV = unfolded.split((N, self.value_dim), dim=-1)
        q = torch.cat((q_BtHN, q_BtHR), dim=-1)
        k = torch.cat((k_BtHN, k_Bt1R.expand_as(q_BtHR)), dim=-1)
        return q, k, v_BtHV

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        """Mix the heads' outputs back to the model width [B, t, M]; for a cache, outputs [B, t, H, C] are latents."""
        if cached:
            heads_BtHV = torch.einsum(
                "bthc,hvc->bthv", heads_BtHV, self._unfolding(heads_BtHV.dtype)[:, -self.value_dim :]
            )
        return self.o_proj(heads_BtHV.flatten(-2))

    def _unfolding(self, dtype: torch.dtype) -> Tensor:
        """Return the weight that unfolds a latent to each head's key and value, [H, N + V, C]."""
        return self.kv_b_proj.merged_weight(dtype).unflatten(0, (self.num_heads, -1))

    def _queries(self, x_BtM: Tensor, *, only_graph: bool) -> Tensor:
        if not self.q_lora_rank:
            return self.q_proj(x_BtM, only_graph=only_graph)
        return self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BtM)), only_graph=only_graph)


class UnfoldedLatentAttention(LatentAttention):
    """Latent attention with a cache that holds no latents: linear attention's state covers unfolded keys."""

    @staticmethod
    def heads(config: ModelConfig, mixer: Mixer, *, cached: bool) -> Heads:
        return LatentAttention.heads(config, mixer, cached=False)

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        return super().project(x_BtM, table, cached=False, only_graph=only_graph)

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        return super().output(heads_BtHV, input_BtM, cached=False)
