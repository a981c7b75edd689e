"""One decoder layer.

Axes: B rows, t tokens of this rank, M model width, H heads, D head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from longctx.architecture.layer_specs import layer_specs
from longctx.architecture.model_rules import MAX_LAYERS
from longctx.batch import ReadTokens
from longctx.config import ModelConfig
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.regions import RegionRunner, call_function
from longctx.model.activation_offload import HostStore, Keep
from longctx.model.attention.core import PassCore, Plan
from longctx.model.attention.sequences import PassCache
from longctx.model.experts.moe_layer import MixtureOfExperts, MoECall
from longctx.model.layers.dropout import Draw, Dropout
from longctx.model.layers.mlp import FeedForward
from longctx.model.layers.norms import build_norm
from longctx.model.mixers.cross_projections import CrossCall
from longctx.model.mixers.grouped_query_attention import GroupedQueryAttention
from longctx.model.mixers.mixer_networks import NETWORKS
from longctx.model.mixers.network import MixerNetwork
from longctx.model.plans import ReadCall
from longctx.model.recompute import RecomputeCache, recomputed
from longctx.model.rotary import RotaryTable

ResidualDropout = tuple[Draw | None, Draw | None, Draw | None]
"""Dropout draws for a layer's residual sums: attention's, the FFN's, and cross attention's if it has one."""

_CROSS_SITES = 2 * MAX_LAYERS
"""Dropout sites below it belong to attention and FFN, two per layer; cross attention's start here."""


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One layer's arguments in a forward pass; for layers with one mixer they differ only in ``layer``."""

    core: PassCore
    plan: Plan
    """The core's plan for this pass, made before the first layer, so that recomputation reads the same one."""
    scores: ScoreRules
    cache: PassCache | None
    dropout: Dropout | None
    experts: MoECall
    layer: int = 0
    """Layer index; several layers may share one block."""
    keep: Keep = "all"
    store: HostStore | None = None
    """Store for tensors that survive until backward; None keeps them on the device."""
    by_chunks: Callable[[Block, Tensor, RotaryTable | None, LayerCall], tuple[Tensor, ...]] | None = None
    """Runs the layer one token chunk at a time; its input is then the handle to a residual stream."""
    only_graph: bool = False
    """True in a recomputation if backward does not read the layer's output."""
    run: RegionRunner = call_function
    """Calls the block's parts on both sides of the core, eager or compiled."""
    cross: CrossCall | None = None
    """Cross attention's arguments, in a decoder that reads a source."""
    read: ReadCall | None = None
    """Tokens whose outputs are read, for the last layer; None: all. Neither with ``dropout`` nor with experts: both
    need all tokens."""

    def residual_dropout(self) -> ResidualDropout:
        """Return the dropout draws for the layer's residual sums."""
        if self.dropout is None:
            return None, None, None
        # Each site draws separate random numbers for the same token.
        of_cross = None
        if self.cross is not None:
            of_cross = self.dropout.draw(_CROSS_SITES + self.layer)
        return self.dropout.draw(2 * self.layer), self.dropout.draw(2 * self.layer + 1), of_cross


class Block(nn.Module):
    """Attention and FFN, each added to the residual stream, with norms before, after or around them."""

    def __init__(self, config: ModelConfig, layer: int, experts: slice = slice(None)) -> None:
        """Build the layer with the weights for ``experts``, this rank's slice."""
        super().__init__()
        M = config.hidden_size
        spec = layer_specs(config)[layer]
        self.order = spec.norm_order
        self.norms_inputs = self.order in ("pre", "sandwich")
        self.norms_outputs = self.order in ("sandwich", "output")
        self.residual_scale = config.residual_scale
        self.self_attn: MixerNetwork = NETWORKS[spec.mixer.name](config, spec)
        if spec.ffn == "experts":
            # Statistics and replays count expert layers, not all layers.
            num_previous_expert_layers = sum(map(config.has_experts, range(layer)))
            self.mlp = MixtureOfExperts(config, experts, layer=num_previous_expert_layers)
        else:
            self.mlp = FeedForward(config, config.ffn_size, bias=config.ffn_bias)
        if self.norms_inputs:
            self.input_layernorm = build_norm(config, M)
        self.post_attention_layernorm = build_norm(config, M)
        if self.order == "sandwich":
            self.pre_feedforward_layernorm = build_norm(config, M)
        if self.order != "pre":
            self.post_feedforward_layernorm = build_norm(config, M)
        # A buffer in the model's dtype, as released; training does not change it.
        self.layer_scalar: Tensor | None
        self.register_buffer("layer_scalar", torch.ones(1) if config.layer_scalars else None)

    def forward(self, x_BtM: Tensor, table: RotaryTable | None, *, call: LayerCall) -> tuple[Tensor, ...]:
        """Return the layer's output [B, t, M], followed by ``RouterStats.tensors`` if it has experts.

        ``call.keep`` selects what survives until backward. With ``call.by_chunks`` x and the output are handles to a
        residual stream in a store.
        """
        if call.by_chunks is not None:
            return call.by_chunks(self, x_BtM, table, call)
        # A cache grows with every forward, so a layer that fills one is never recomputed.
        if call.cache is not None or not torch.is_grad_enabled():
            return self._run(x_BtM, table, call, None)
        if call.store is None:
            return self._run_and_keep(x_BtM, table, call)
        with call.store.layer(call.layer):
            return self._run_and_keep(x_BtM, table, call)

    # Activation checkpointing (Chen et al., arXiv 1604.06174) that saves attention. With keep="attention" the input x
    # and the core's result survive until backward, and in an expert layer the expert ids, plus the experts' output if a
    # norm reads it. Backward recomputes the rest: that sends nothing and runs no softmax attention (linear attention
    # recomputes its own rows); only the experts' backward sends their tokens again. With keep="inputs" x and the ids
    # survive, and the core computes and sends a second time.
    def _run_and_keep(self, x_BtM: Tensor, table: RotaryTable | None, call: LayerCall) -> tuple[Tensor, ...]:
        if call.keep == "all":
            return self._run(x_BtM, table, call, None)
        return recomputed(self._run, x_BtM, table, call, keep=call.keep, store=call.store)

    def _run(
        self, x_BtM: Tensor, table: RotaryTable | None, call: LayerCall, recompute_cache: RecomputeCache | None
    ) -> tuple[Tensor, ...]:
        heads_BtHV = self._run_core(x_BtM, table, call, recompute_cache)
        read = call.read
        if read is not None:
            # Other tokens served attention only.
            x_BtM = read.tokens.select(x_BtM)
            if read.plan is None:
                heads_BtHV = read.tokens.select(heads_BtHV)
        return self.finish(x_BtM, heads_BtHV, call.residual_dropout(), call, recompute_cache)

    def _run_core(
        self, x_BtM: Tensor, table: RotaryTable | None, call: LayerCall, recompute_cache: RecomputeCache | None
    ) -> Tensor:
        """Project the layer's input and run the attention core on it."""
        cache, cached, plan = None, call.cache is not None, call.plan
        if call.read is not None and call.read.plan is not None:
            plan = call.read.plan
            q, k, v = self._project_read(x_BtM, call.read.tokens)
        else:
            q, k, v = call.run(Block.before_core, self, x_BtM, table, cached)
        if call.cache is not None:
            cache = call.cache.layer(call.layer)
        weights = self.self_attn.core_weights()
        # Called from here and not deeper: a core runs outside compiled graphs and breaks each function around it.
        return call.core(
            q, k, v, plan=plan, cache=cache, scores=call.scores, weights=weights, recompute_cache=recompute_cache
        )

    def finish(
        self,
        x_BtM: Tensor,
        heads_BtHV: Tensor,
        residual_dropout: ResidualDropout,
        call: LayerCall,
        recompute_cache: RecomputeCache | None,
    ) -> tuple[Tensor, ...]:
        """Compute the layer's results from its input and the core's result."""
        cached = call.cache is not None
        if isinstance(self.mlp, FeedForward):
            return (call.run(Block.after_core, self, x_BtM, heads_BtHV, residual_dropout, cached, call.only_graph),)
        # Experts stay outside the graph: the token count per expert depends on data.
        x_BtM, normed_BtM = call.run(Block.join_attention, self, x_BtM, heads_BtHV, residual_dropout, cached)
        out_BtM, *stats = self.mlp(normed_BtM, call.experts, recompute_cache)
        return self.join_ffn(x_BtM, out_BtM, residual_dropout), *stats

    def before_core(
        self, x_BtM: Tensor, table: RotaryTable | None, cached: bool, only_graph: bool = False
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Project the layer's input to queries, keys and values (``project``)."""
        normed_BtM = self.before(x_BtM, "input_layernorm")
        return self.self_attn.project(normed_BtM, table, cached=cached, only_graph=only_graph)

    def _project_read(self, x_BtM: Tensor, read: ReadTokens) -> tuple[Tensor, Tensor, Tensor]:
        """Project the tokens read to queries [1, F, H, D], and all tokens to keys and values."""
        assert isinstance(self.self_attn, GroupedQueryAttention), "planned for a mixer without separate queries"
        normed_BtM = self.before(x_BtM, "input_layernorm")
        return self.self_attn.queries(read.select(normed_BtM)), *self.self_attn.keys_and_values(normed_BtM)

    def after_core(
        self,
        x_BtM: Tensor,
        heads_BtHV: Tensor,
        residual_dropout: ResidualDropout,
        cached: bool,
        only_graph: bool = False,
    ) -> Tensor:
        """Compute a dense layer's output from its input and the core's result."""
        x_BtM, normed_BtM = self.join_attention(x_BtM, heads_BtHV, residual_dropout, cached)
        # An output norm reads values, so the FFN must compute them.
        only_graph = only_graph and self.order == "pre"
        return self.join_ffn(x_BtM, self.mlp(normed_BtM, only_graph=only_graph), residual_dropout)

    def add_attention(self, x_BtM: Tensor, heads_BtHV: Tensor, draw: Draw | None, cached: bool) -> Tensor:
        """Add attention to the residual stream, given the layer's input and the core's result."""
        input_BtM = None
        if self.self_attn.gates_output:
            # Recomputing the norm costs less than keeping its result in addition to the projections.
            input_BtM = self.before(x_BtM, "input_layernorm")
        out_BtM = self.self_attn.output(heads_BtHV, input_BtM, cached=cached)
        if self.norms_outputs:
            out_BtM = self.post_attention_layernorm(out_BtM)
        x_BtM = self.add(x_BtM, out_BtM, draw)
        if self.order == "post":
            x_BtM = self.post_attention_layernorm(x_BtM)
        return x_BtM

    def join_attention(
        self, x_BtM: Tensor, heads_BtHV: Tensor, residual_dropout: ResidualDropout, cached: bool
    ) -> tuple[Tensor, Tensor]:
        """Add attention to the residual stream; return the stream and the input to the FFN or the experts."""
        x_BtM = self.add_attention(x_BtM, heads_BtHV, residual_dropout[0], cached)
        # Hugging Face's names: only a sandwich has a norm called pre_feedforward_layernorm.
        second = "post_attention_layernorm"
        if self.order == "sandwich":
            second = "pre_feedforward_layernorm"
        return x_BtM, self.before(x_BtM, second)

    def join_ffn(self, x_BtM: Tensor, out_BtM: Tensor, residual_dropout: ResidualDropout) -> Tensor:
        """Add the FFN's or the experts' output to the residual stream."""
        if self.norms_outputs:
            out_BtM = self.post_feedforward_layernorm(out_BtM)
        x_BtM = self.add(x_BtM, out_BtM, residual_dropout[1])
        if self.order == "post":
            x_BtM = self.post_feedforward_layernorm(x_BtM)
        if self.layer_scalar is not None:
            x_BtM = x_BtM * self.layer_scalar.to(x_BtM.dtype)
        return x_BtM

    def before(self, x_BtM: Tensor, norm: str) -> Tensor:
        """Return a part's input: the normed residual stream, or x if the layer norms only outputs or sums."""
        if not self.norms_inputs:
            return x_BtM
        return getattr(self, norm)(x_BtM)

    def add(self, x_BtM: Tensor, part_BtM: Tensor, draw: Draw | None) -> Tensor:
        """Add one part's output to the residual stream, after dropout and scaling."""
        if draw is not None:
            part_BtM = draw.drop(part_BtM)
        if self.residual_scale != 1:
            part_BtM = part_BtM * self.residual_scale
        return x_BtM + part_BtM
