"""Bytes per token in a layer, by layer kind: saved for backward, or passed between projections, core and FFN.

Sizes: M model width, K key heads, H value heads, D key head size, V value head size.
"""

from __future__ import annotations

from typing import NamedTuple

from launcher.config.resolved import ResolvedConfig
from longctx.architecture.layer_specs import layer_specs
from longctx.architecture.mixers.gated_delta_mixer import GatedDeltaMixer, KimiDeltaMixer
from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer
from longctx.architecture.model_rules import GATED
from longctx.config import ModelConfig
from longctx.kernels.gated_delta.gated_delta_call import BLOCK_CHUNKS, CHUNK

FLOAT32 = 4
"""Bytes per value."""
_LOGSUMEXP = 8
"""Bytes per head."""


class CoreBytes(NamedTuple):
    """Bytes per token around a layer's core."""

    q: int
    """Queries."""
    kv: int
    """Keys and values."""
    out: int
    """The core's output."""
    lse: int
    """Other core tensors saved for backward: log-sum-exps, or a share of the states."""
    output_saved: int = 0
    """Saved between the core's output and the output projection."""

    def of_group(self, of_heads: int, of_keys: int) -> CoreBytes:
        """Return one group's bytes, with this many groups of query heads and of key heads."""
        return CoreBytes(
            self.q // of_heads,
            self.kv // of_keys,
            self.out // of_heads,
            self.lse // of_heads,
            self.output_saved // of_heads,
        )


def _delta_core(model: ModelConfig, mixer: Mixer, width: int) -> CoreBytes:
    """Return bytes for a gated delta rule layer: a state per ``BLOCK_CHUNKS`` chunks, then gate and norm."""
    K, H, D, V, _ = model.delta_sizes
    # Values come with the inputs to decays, one per head or channel, and to β.
    gates = 2 * H
    if isinstance(mixer, KimiDeltaMixer):
        gates = H * (D + 1)
    states = H * D * V * FLOAT32 // (CHUNK * BLOCK_CHUNKS)
    # In float32: the norm's input and output, the gate before and after its function. In the dtype: gate and product.
    return CoreBytes(K * D * width, (K * D + H * V + gates) * width, H * V * width, states, H * V * (16 + 2 * width))


class TokenBytes:
    """Bytes per token in a layer, for a run's model and dtype.

    ``x`` is the residual stream; ``attention`` is a softmax layer's core, with its ``q``, ``kv``, ``out`` and ``lse``.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config, self.model, self.width = config, config.model.config(), config.dtype.itemsize
        model, width = self.model, self.width
        self.x = model.hidden_size * width
        self.q = model.num_heads * model.head_dim * width
        self.out = model.num_heads * model.value_dim * width
        self.kv = model.num_kv_heads * (model.head_dim + model.value_dim) * width
        self.lse = model.num_heads * _LOGSUMEXP
        self.attention = CoreBytes(self.q, self.kv, self.out, self.lse)
        if model.attention_gate:
            # The gate, and its product with the output.
            self.attention = self.attention._replace(output_saved=2 * self.out + self.x)
        self.chunked = bool(config.train.chunk_tokens)

    def core(self, layer: int) -> CoreBytes:
        """Return a layer's core bytes."""
        mixer = layer_specs(self.model)[layer].mixer
        if isinstance(mixer, ImageWindowMixer):
            # A softmax in float32 and rounded, over the patches in a window.
            return self.attention._replace(lse=self.model.num_heads * mixer.side**2 * (FLOAT32 + self.width))
        if isinstance(mixer, GatedDeltaMixer):
            return _delta_core(self.model, mixer, self.width)
        if isinstance(mixer, SoftmaxMixer) and mixer.has_own_heads:
            K, D = mixer.key_heads(self.model)
            queries = self.model.num_heads * D * self.width
            return self.attention._replace(q=queries, kv=2 * K * D * self.width, out=queries)
        return self.attention

    def is_delta(self, layer: int) -> bool:
        """Return True if the layer passes a recurrent state on."""
        return isinstance(layer_specs(self.model)[layer].mixer, GatedDeltaMixer)

    def is_window(self, layer: int) -> bool:
        """Return True if the layer attends in windows of patches, and recomputes their scores."""
        return isinstance(layer_specs(self.model)[layer].mixer, ImageWindowMixer)

    def kept_of(self, layer: int) -> int:
        """Return the bytes that a layer's forward saves for backward."""
        keep, model, core = self.config.train.keep, self.model, self.core(layer)
        if self.is_window(layer):
            # Nothing that attention needs in backward is kept, only what chunks pass on.
            core = core._replace(lse=core.lse if keep == "all" and not self.chunked else 0)
            if keep == "attention" and not self.chunked:
                return self.x
        routing = 0
        if model.has_experts(layer):
            routing = self.routing()
        if keep == "inputs":
            return self.x + routing
        crossed = self.kept_of_cross()
        if keep == "attention":
            return self.x + core.out + core.lse + routing + crossed
        if self.chunked:
            return self.x + core.q + core.kv + core.out + core.lse + routing + crossed
        # Inputs to both norms, attention and FFN; queries, keys, values and attention's output; FFN tensors.
        own = self.before_core(layer) + core.out + core.lse + core.output_saved
        return 4 * self.x + own + routing + self.saved_of_ffn(layer) + crossed

    def kept_of_cross(self) -> int:
        """Return the bytes that a layer's cross attention saves, without keys and values."""
        if not self.model.encoder_layers:
            return 0
        kept = self.q + self.lse
        if self.config.train.keep == "all" and not self.chunked:
            # Queries, the norm's input, and the projection's input.
            kept += self.q + 2 * self.x
        return kept

    def routing(self) -> int:
        """Return bytes for a token's expert choices and gates."""
        return 2 * self.model.experts_per_token * 8

    def before_core(self, layer: int) -> int:
        """Return bytes for queries, keys, values, and tensors their projections save, without their normed input."""
        core = self.core(layer)
        model, saved = self.model, core.q + core.kv
        if self.is_delta(layer):
            return saved
        if model.qk_norm != "none":
            # Values have no norm here, only keys.
            saved += core.q + core.kv * model.head_dim // (model.head_dim + model.value_dim)
        if model.v_norm:
            saved += core.kv // 2
        if model.is_latent:
            saved += 2 * (model.q_lora_rank + model.kv_lora_rank) * self.width + model.rope_head_dim * self.width
        return saved

    def saved_of_ffn(self, layer: int) -> int:
        model, width = self.model, self.width
        if not model.has_experts(layer):
            return self.saved_of_activation() * model.ffn_size * width
        saved = self.inputs_of_activation() * model.shared_ffn_size * width
        per_token = model.experts_per_token * width
        inner_values = self.inputs_of_activation() * model.expert_ffn_size
        if self.config.train.recompute_experts == "none":
            saved += per_token * (inner_values + model.expert_ffn_size + model.hidden_size)
        elif self.config.train.recompute_experts == "activation":
            saved += per_token * inner_values
        return saved

    def saved_of_activation(self) -> int:
        """Return how many tensors a dense FFN saves: gate and up projection, or a plain activation's input and output.

        ReLU reads its own output in backward.
        """
        return 1 if self.model.activation == "relu" else 2

    def inputs_of_activation(self) -> int:
        if self.model.activation in GATED:
            return 2
        return 1
