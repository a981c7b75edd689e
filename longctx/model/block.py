"""One decoder layer.

Axes: B rows, t tokens of this rank, M model width, H heads, D head size, V value head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.attention.contract import Scores
from longctx.model.attention.core import PassCache, PassCore, Plan
from longctx.model.attention.projections import build_attention
from longctx.model.experts.layer import MixtureOfExperts, MoECall
from longctx.model.layers.dropout import Dropout
from longctx.model.layers.mlp import FeedForward
from longctx.model.layers.norms import build_norm
from longctx.model.recompute import RecomputeCache, recomputed, recomputed_in_graph
from longctx.model.rotary import RotaryTable


@dataclass(frozen=True, eq=False)
class Call:
    """What a forward pass tells all layers of one kind."""

    core: PassCore
    plan: Plan
    """The core's own, for this forward pass; made before the first layer, so that recomputation reads the same."""
    scores: Scores
    cache: PassCache | None
    dropout: Dropout | None
    recompute: bool
    experts: MoECall


class Block(nn.Module):
    """Attention and FFN, each added to the residual stream, with norms before, after or around them."""

    def __init__(self, config: ModelConfig, layer: int, experts: slice = slice(None)) -> None:
        """``experts`` are the layer's experts whose weights are here."""
        super().__init__()
        M = config.hidden_size
        self.layer = layer
        self.order = config.norm_order
        self.residual_scale = config.residual_scale
        self.self_attn = build_attention(config, layer)
        if config.has_experts(layer):
            # Statistics and replays count layers of experts, not all layers.
            earlier_expert_layers = sum(map(config.has_experts, range(layer)))
            self.mlp = MixtureOfExperts(config, experts, layer=earlier_expert_layers)
        else:
            self.mlp = FeedForward(config, config.ffn_size, bias=config.ffn_bias)
        if self.order != "post":
            self.input_layernorm = build_norm(config, M)
        self.post_attention_layernorm = build_norm(config, M)
        if self.order == "sandwich":
            self.pre_feedforward_layernorm = build_norm(config, M)
        if self.order != "pre":
            self.post_feedforward_layernorm = build_norm(config, M)

    def forward(self, x_BtM: Tensor, table: RotaryTable | None, *, call: Call) -> tuple[Tensor, ...]:
        """The layer's output [B, t, M], and its router's ``RouterStats.tensors`` (a dense layer has none).

        When recomputed, only x and the core's result survive until backward, which computes the rest anew, and of a
        layer of experts their ids and output. Recomputing sends nothing and computes no softmax attention (linear
        attention's own rows it does); the experts' own backward sends their tokens again.
        """
        # A cache grows with every run, so a layer that fills one runs once.
        if not call.recompute or call.cache is not None or not torch.is_grad_enabled():
            return self._run(x_BtM, table, call, None)
        if torch.compiler.is_compiling() and call.plan.in_graph:
            return recomputed_in_graph(self._run, x_BtM, table, call)
        return recomputed(self._run, x_BtM, table, call)

    def _run(
        self, x_BtM: Tensor, table: RotaryTable | None, call: Call, recompute_cache: RecomputeCache | None
    ) -> tuple[Tensor, ...]:
        attention, sinks_H, cache = self.self_attn, None, None
        q, k, v = attention.project(self._before(x_BtM, "input_layernorm"), table, cached=call.cache is not None)
        if attention.sinks is not None:
            sinks_H = attention.sinks()
        if call.cache is not None:
            cache = call.cache.layer(self.layer)
        # called from here and from nothing deeper: a core outside of compiled graphs breaks each function around it
        heads_BtHV = call.core(
            q,
            k,
            v,
            plan=call.plan,
            cache=cache,
            scores=call.scores,
            sinks_H=sinks_H,
            recompute_cache=recompute_cache,
        )
        return self._after_core(x_BtM, heads_BtHV, call, recompute_cache)

    def _after_core(
        self, x_BtM: Tensor, heads_BtHV: Tensor, call: Call, recompute_cache: RecomputeCache | None
    ) -> tuple[Tensor, ...]:
        out_BtM = self.self_attn.output(heads_BtHV, cached=call.cache is not None)
        if self.order == "sandwich":
            out_BtM = self.post_attention_layernorm(out_BtM)
        x_BtM = self._add(x_BtM, out_BtM, 0, call)
        if self.order == "post":
            x_BtM = self.post_attention_layernorm(x_BtM)
        # Hugging Face's names: only a sandwich has a norm called pre_feedforward_layernorm.
        second = "post_attention_layernorm"
        if self.order == "sandwich":
            second = "pre_feedforward_layernorm"
        out_BtM, *stats = self._feed(self._before(x_BtM, second), call, recompute_cache)
        if self.order == "sandwich":
            out_BtM = self.post_feedforward_layernorm(out_BtM)
        x_BtM = self._add(x_BtM, out_BtM, 1, call)
        if self.order == "post":
            x_BtM = self.post_feedforward_layernorm(x_BtM)
        return x_BtM, *stats

    def _before(self, x_BtM: Tensor, norm: str) -> Tensor:
        if self.order == "post":
            return x_BtM
        return getattr(self, norm)(x_BtM)

    def _add(self, x_BtM: Tensor, part_BtM: Tensor, site: int, call: Call) -> Tensor:
        """The residual stream with one part's output added."""
        # Two sites a layer: each draws other random numbers for the same token.
        if call.dropout is not None:
            part_BtM = call.dropout(part_BtM, 2 * self.layer + site)
        if self.residual_scale != 1:
            part_BtM = part_BtM * self.residual_scale
        return x_BtM + part_BtM

    def _feed(self, normed_BtM: Tensor, call: Call, recompute_cache: RecomputeCache | None) -> tuple[Tensor, ...]:
        """The FFN's output, and the statistics of its router."""
        mlp = self.mlp
        if isinstance(mlp, FeedForward):
            return (mlp(normed_BtM),)
        return mlp(normed_BtM, call.experts, recompute_cache)
