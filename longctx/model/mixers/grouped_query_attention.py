"""Grouped-query projections, for softmax and linear attention; relative positions.

Axes: B rows, t tokens of this rank, M model width, H query heads, K key/value heads, D query/key head size, V value
head size, P channels for relative positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.architecture.layer_specs import LayerSpec
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer
from longctx.config import ModelConfig
from longctx.kernels.rms_norm import rms_norm
from longctx.model.layers.linear import Linear, Weight
from longctx.model.mixers.network import Heads
from longctx.model.mixers.normed_heads import NormedHeads
from longctx.model.rotary import RotaryTable, apply_rotary_to_both


class GroupedQueryAttention(NormedHeads):
    """One projection each for queries, keys and values; K = H is multi-head, K = 1 multi-query attention."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__()
        (K, D), M, H = spec.mixer.key_heads(config), config.hidden_size, config.num_heads
        self.v_norm, self.eps = config.v_norm, config.norm_eps
        self.gates_output = config.attention_gate
        if self.gates_output:
            self.gate_proj = Linear(M, H * D, bias=config.qkv_bias)
        self.interleaved = spec.rope is not None and spec.rope.interleaved
        self.q_proj = Linear(M, H * D, bias=config.qkv_bias)
        self.k_proj = Linear(M, K * D, bias=config.qkv_bias)
        # Registered even if None: values are then the keys, before norm and positions.
        self.v_proj: Linear | None = None
        if not (isinstance(spec.mixer, SoftmaxMixer) and spec.mixer.shares_values(config)):
            self.v_proj = Linear(M, K * D, bias=config.qkv_bias)
        self.o_proj = Linear(H * D, M, bias=config.o_bias)
        self.add_norms(config, H, K, D)
        self.relative = None
        if config.position == "relative":
            self.relative = RelativePositions(config)
        self.sinks = None
        if config.sinks:
            self.sinks = Weight(H)

    def core_weights(self) -> tuple[Tensor, ...]:
        """Return the sinks, one logit per query head; empty if the model has no sinks."""
        return () if self.sinks is None else (self.sinks(),)

    @staticmethod
    def heads(config: ModelConfig, mixer: Mixer, *, cached: bool) -> Heads:
        """Return the head counts and sizes that ``project`` produces."""
        K, D = mixer.key_heads(config)
        keys = D
        if config.position == "relative":
            # Distance channels follow the content channels.
            keys += config.hidden_size
        return Heads(config.num_heads, K, keys, D)

    def project(
        self, x_BtM: Tensor, table: RotaryTable | None, *, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project to queries [B, t, H, D], keys [B, t, K, D] and values [B, t, K, V], with positions in the first two.

        With relative positions queries and keys are wider than D. With ``only_graph`` values that no backward reads are
        NaN.
        """
        q = self.queries(x_BtM, only_graph=only_graph)
        k, v = self.keys_and_values(x_BtM, only_graph=only_graph)
        if table is None:
            return q, k, v
        # Positions come after the norm: rotation keeps a normed head's length.
        if self.relative is not None:
            q, k = self.relative(q, k, table.cos, table.sin)
        else:
            q, k = apply_rotary_to_both(q, k, table, interleaved=self.interleaved, only_graph=only_graph)
        return q, k, v

    def queries(self, x_BtM: Tensor, *, only_graph: bool = False) -> Tensor:
        """Project tokens to queries [B, t, H, D], before positions."""
        return self.normed_queries(self.q_proj(x_BtM, only_graph=only_graph and self._skips_values))

    def keys_and_values(self, x_BtM: Tensor, *, only_graph: bool = False) -> tuple[Tensor, Tensor]:
        """Project tokens to keys and values [B, t, K, D], before positions."""
        k = self.k_proj(x_BtM, only_graph=only_graph and self._skips_values)
        v = k
        if self.v_proj is not None:
            v = self.v_proj(x_BtM, only_graph=only_graph and not self.v_norm)
        v = self.split_heads(v)
        if self.v_norm:
            v = rms_norm(v, v.new_ones(self.head_dim), self.eps)
        return self.normed_keys(k), v

    @property
    def _skips_values(self) -> bool:
        """True if backward reads the values of neither queries nor keys."""
        # Norms read both, and relative positions multiply the queries, so their values must be computed.
        return self.qk_norm == "none" and self.relative is None and not self.v_norm

    def output(self, heads_BtHV: Tensor, input_BtM: Tensor | None, *, cached: bool) -> Tensor:
        """Gate the heads' outputs if the model has gates, and mix them back to the model width [B, t, M]."""
        if input_BtM is not None:
            gates_BtHV = self.gate_proj(input_BtM).unflatten(-1, heads_BtHV.shape[2:])
            heads_BtHV = heads_BtHV * torch.sigmoid(gates_BtHV)
        return self.o_proj(heads_BtHV.flatten(-2))


# sin and cos of i − j are sums of products of those of i and j, so the position term is a dot product too: query
# channels computed from q and i times key channels computed from j only. Any kernel, and any ring, then computes it
# exactly.
class RelativePositions(nn.Module):
    """Transformer-XL's scores (q + u)·k + (q + v)·W·r(i − j), r being sinusoids (arXiv 1901.02860 §3.3)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        H, D, P = config.num_heads, config.head_dim, config.hidden_size
        self.content_bias = nn.Parameter(torch.empty(H, D))
        self.position_bias = nn.Parameter(torch.empty(H, D))
        self.weight = nn.Parameter(torch.empty(H, D, P))

    def forward(self, q_BtHD: Tensor, k_BtKD: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return queries [B, t, H, D + P] and keys [B, t, K, D + P]; the table is [B, t, P/2]."""
        factors_BtHP = _HeadProduct.apply(q_BtHD + self.position_bias, self.weight)
        # Factors a on sin(i − j) and b on cos(i − j), in the table's dtype, like the angles.
        a, b = factors_BtHP.to(cos.dtype).chunk(2, dim=-1)
        cos_i, sin_i = cos.unsqueeze(-2), sin.unsqueeze(-2)
        # a·sin(i − j) + b·cos(i − j) = (a·sin i + b·cos i)·cos j + (b·sin i − a·cos i)·sin j
        of_cos_j = a * sin_i + b * cos_i
        of_sin_j = b * sin_i - a * cos_i
        q = torch.cat((q_BtHD + self.content_bias, of_cos_j.to(q_BtHD.dtype), of_sin_j.to(q_BtHD.dtype)), dim=-1)
        # A key's position channels are equal in all heads.
        position_Bt1P = torch.cat((cos_i, sin_i), dim=-1).to(k_BtKD.dtype)
        k = torch.cat((k_BtKD, position_Bt1P.expand(-1, -1, k_BtKD.shape[2], -1)), dim=-1)
        return q, k


class _HeadProduct(torch.autograd.Function):
    """Autograd function for [B, t, H, D] times each head's [D, P].

    It saves the parameter itself, not a view as einsum would: ZeRO-3 frees a gathered weight by emptying the parameter,
    and a view would hold it until backward.
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
