"""``TokenBytes``: what one token takes in a layer, and what forward keeps of it for backward."""

from __future__ import annotations

from launcher.config.resolved import ResolvedConfig
from longctx.architecture.rules import GATED

_LOGSUMEXP = 8
"""Bytes a head."""


class TokenBytes:
    """Bytes of a token's values in a layer of a run's model, in the run's dtype.

    ``x`` is the residual stream's, ``q`` all queries, ``kv`` keys and values, ``out`` attention's result, ``lse`` its
    log-sum-exp.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config, self.model, self.width = config, config.model.config(), config.dtype.itemsize
        model, width = self.model, self.width
        self.x = model.hidden_size * width
        self.q = model.num_heads * model.head_dim * width
        self.out = model.num_heads * model.value_dim * width
        self.kv = model.num_kv_heads * (model.head_dim + model.value_dim) * width
        self.lse = model.num_heads * _LOGSUMEXP
        self.chunked = bool(config.train.chunk_tokens)

    def kept_of(self, layer: int) -> int:
        """What forward keeps of a layer."""
        keep, model = self.config.train.keep, self.model
        routing = 0
        if model.has_experts(layer):
            routing = self.routing()
        if keep == "inputs":
            return self.x + routing
        if keep == "attention":
            return self.x + self.out + self.lse + routing
        if self.chunked:
            return self.x + self.q + self.kv + self.out + self.lse + routing
        # Inputs of both norms and parts; queries, keys, values and attention's result; the FFN's.
        return 4 * self.x + self.before_core() + self.out + self.lse + routing + self.saved_of_ffn(layer)

    def routing(self) -> int:
        """A token's experts and gates."""
        return 2 * self.model.experts_per_token * 8

    def before_core(self) -> int:
        """Queries, keys and values, and what their projections save beside the layer's normed input."""
        model, saved = self.model, self.q + self.kv
        if model.qk_norm != "none":
            saved += self.q + model.num_kv_heads * model.head_dim * self.width
        if model.is_latent:
            saved += 2 * (model.q_lora_rank + model.kv_lora_rank) * self.width + model.rope_head_dim * self.width
        return saved

    def saved_of_ffn(self, layer: int) -> int:
        model, width = self.model, self.width
        if not model.has_experts(layer):
            return self.inputs_of_activation() * model.ffn_size * width
        saved = self.inputs_of_activation() * model.shared_ffn_size * width
        per_token = model.experts_per_token * width
        wide = self.inputs_of_activation() * model.expert_ffn_size
        if self.config.train.recompute_experts == "none":
            saved += per_token * (wide + model.expert_ffn_size + model.hidden_size)
        elif self.config.train.recompute_experts == "activation":
            saved += per_token * wide
        return saved

    def inputs_of_activation(self) -> int:
        if self.model.activation in GATED:
            return 2
        return 1
