"""What forward keeps for backward and what passes, by arithmetic: ``plan --trace`` is the truth it is held to.

Bytes are of one micro-batch on one rank. Names of sizes: M model width, F inner width of an FFN, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from launcher.config.resolved import ResolvedConfig
from launcher.plan.encoder import encoder_run, num_source_tokens
from launcher.plan.parameters import num_layer_parameters
from launcher.plan.workspace import BackwardCall, backward_workspace, expected_kernel
from longctx.architecture.layers import groups_of, layer_specs
from longctx.architecture.mixers.gated_delta import GatedDelta, KimiDelta
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.mixers.softmax import Softmax
from longctx.architecture.rules import GATED
from longctx.config import ModelConfig
from longctx.kernels.cross_entropy import TILE_ELEMENTS, tokens_of_chunk
from longctx.kernels.gated_delta.call import BLOCK_CHUNKS, CHUNK
from longctx.model.chunks.head import ROWS_OF_SUMS

_FLOAT32 = 4
_LOGSUMEXP = 8
"""Bytes a head."""
_LOGITS_OF_GPU = 1 << 29
"""Of a chunk, at most (longctx/kernels/cross_entropy.py)."""
_BLOCK_OF_GPU = 1 << 27
"""Of them, those that are worked on at once, in float32."""


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Bytes beside weights, gradients and optimiser."""

    kept: int
    """On the device between forward and backward."""
    kept_on_host: int
    kept_on_disk: int
    passing: int
    """What backward, or the loss, adds to that at its peak."""


def activations(
    config: ResolvedConfig, tokens: int, *, ring: int, device_type: str = "cuda", num_documents: int = 1
) -> Activations:
    """For so many ``tokens`` of a micro-batch on each rank, in a ring of so many ranks, on devices of this type.

    ``num_documents`` counts those that a rank has a part of.
    """
    own = _Layers(config, tokens, ring, device_type, num_documents).activations()
    of_source = encoder_run(config)
    if of_source is None:
        return own
    return _with_encoder(own, _Layers(of_source, num_source_tokens(config), ring, device_type, num_documents), config)


def _with_encoder(decoder: Activations, encoder: _Layers, config: ResolvedConfig) -> Activations:
    """Of both stacks: the encoder's layers are kept while the decoder runs, and come last in backward."""
    kept, on_host, on_disk = encoder.kept_of_layers()
    # What the decoder's layers read, and its gradient.
    kept += 2 * encoder.tokens * encoder.x
    if config.train.keep == "all" and not encoder.chunked:
        # Keys and values of each layer's cross attention.
        kept += config.model.num_layers * encoder.tokens * encoder.kv
    last = max(kept + point for layer in {0, encoder.model.num_layers - 1} for point in encoder.points(layer))
    peak = max(decoder.kept + decoder.passing + kept, last)
    return Activations(
        kept=decoder.kept + kept,
        kept_on_host=decoder.kept_on_host + on_host,
        kept_on_disk=decoder.kept_on_disk + on_disk,
        passing=peak - decoder.kept - kept,
    )


class _CoreBytes(NamedTuple):
    """Bytes of a token around the core of a layer."""

    q: int
    """Its queries."""
    kv: int
    """Its keys and values."""
    out: int
    """The core's result."""
    lse: int
    """What else the core keeps: log-sum-exps, or a share of the states."""
    behind: int = 0
    """What the way from the result to the output projection saves."""

    def of_group(self, of_heads: int, of_keys: int) -> _CoreBytes:
        """Return those of one of so many groups of query heads, and of key heads."""
        return _CoreBytes(
            self.q // of_heads, self.kv // of_keys, self.out // of_heads, self.lse // of_heads, self.behind // of_heads
        )


def _around_delta(model: ModelConfig, mixer: Mixer, width: int) -> _CoreBytes:
    """Of a layer with a gated delta rule: the state at the start of each block, and gate and norm behind it."""
    K, H, D, V, _ = model.delta_sizes
    # Beside the values stand the inputs of decays, one a head or a channel, and of β.
    gates = 2 * H
    if isinstance(mixer, KimiDelta):
        gates = H * (D + 1)
    states = H * D * V * _FLOAT32 // (CHUNK * BLOCK_CHUNKS)
    # In float32 the norm's input and output and the gate before and behind its function; gate and product in the dtype.
    return _CoreBytes(K * D * width, (K * D + H * V + gates) * width, H * V * width, states, H * V * (16 + 2 * width))


class _TokenBytes:
    """Bytes of a token's values in a layer of a run's model, in the run's dtype.

    ``x`` is the residual stream's, ``attention`` that of a softmax layer; ``q``, ``kv``, ``out`` and ``lse`` are its.
    """

    def __init__(self, config: ResolvedConfig) -> None:
        self.config, self.model, self.width = config, config.model.config(), config.dtype.itemsize
        model, width = self.model, self.width
        self.x = model.hidden_size * width
        self.q = model.num_heads * model.head_dim * width
        self.out = model.num_heads * model.value_dim * width
        self.kv = model.num_kv_heads * (model.head_dim + model.value_dim) * width
        self.lse = model.num_heads * _LOGSUMEXP
        self.attention = _CoreBytes(self.q, self.kv, self.out, self.lse)
        if model.attention_gate:
            # The gate, and its product with the result.
            self.attention = self.attention._replace(behind=2 * self.out + self.x)
        self.chunked = bool(config.train.chunk_tokens)

    def core(self, layer: int) -> _CoreBytes:
        """Of a layer's core."""
        mixer = layer_specs(self.model)[layer].mixer
        if isinstance(mixer, GatedDelta):
            return _around_delta(self.model, mixer, self.width)
        if isinstance(mixer, Softmax) and mixer.has_own_heads:
            K, D = mixer.key_heads(self.model)
            queries = self.model.num_heads * D * self.width
            return self.attention._replace(q=queries, kv=2 * K * D * self.width, out=queries)
        return self.attention

    def is_delta(self, layer: int) -> bool:
        """Whether a layer passes a state on."""
        return isinstance(layer_specs(self.model)[layer].mixer, GatedDelta)

    def kept_of(self, layer: int) -> int:
        """What forward keeps of a layer."""
        keep, model, core = self.config.train.keep, self.model, self.core(layer)
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
        # Inputs of both norms and parts; queries, keys, values and attention's result; the FFN's.
        own = self.before_core(layer) + core.out + core.lse + core.behind
        return 4 * self.x + own + routing + self.saved_of_ffn(layer) + crossed

    def kept_of_cross(self) -> int:
        """What forward keeps of a layer's cross attention, but for keys and values."""
        if not self.model.encoder_layers:
            return 0
        kept = self.q + self.lse
        if self.config.train.keep == "all" and not self.chunked:
            # Queries, the norm's input and theirs.
            kept += self.q + 2 * self.x
        return kept

    def routing(self) -> int:
        """A token's experts and gates."""
        return 2 * self.model.experts_per_token * 8

    def before_core(self, layer: int) -> int:
        """Queries, keys and values, and what their projections save beside the layer's normed input."""
        core = self.core(layer)
        model, saved = self.model, core.q + core.kv
        if self.is_delta(layer):
            return saved
        if model.qk_norm != "none":
            # Of keys and values the keys.
            saved += core.q + core.kv * model.head_dim // (model.head_dim + model.value_dim)
        if model.v_norm:
            saved += core.kv // 2
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


class _Layers(_TokenBytes):
    """The layers of a model over the tokens of a rank; sums of bytes a token where nothing else is said."""

    def __init__(
        self, config: ResolvedConfig, tokens: int, ring: int, device_type: str, num_documents: int = 1
    ) -> None:
        super().__init__(config)
        self.tokens, self.ring, self.device_type = tokens, ring, device_type
        self.num_documents = num_documents

    def activations(self) -> Activations:
        """The sums."""
        model, train = self.model, self.config.train
        layers = [self.kept_of(layer) for layer in range(model.depth)]
        heads, weights = 1 + model.mtp_layers, model.vocab_size * model.embedding_dim
        by_rows = sums_head_by_rows(self.config, model)
        head = 0 if by_rows else heads * weights * _FLOAT32
        # Rotary tables, ids, positions.
        shared = self.tokens * (model.head_dim * _FLOAT32 + 64)
        if model.num_experts:
            # Of the layer at work: choices and gates, and their order.
            shared += self.tokens * 2 * self.routing()
        last = self.x
        if self.chunked:
            # The gradient takes the place of the last layer's output.
            last = 0
        on_device, on_host, on_disk, stream = _places(self, layers, _kept_ahead(self) + by_rows * heads * self.x)
        kept = self.tokens * (sum(on_device) + last + stream) + head + shared
        # In backward of the last layer the head's gradient and the last norm's input are gone.
        below = self.tokens * sum(on_device) + shared
        if not self.chunked:
            below += self.tokens * stream
        if train.store == "host" and not self.chunked and len(layers) > 1:
            below += self.tokens * layers[-2]
        peaks = [kept + loss_bytes(self.config, self.tokens, self.device_type)]
        if by_rows:
            # The gradient in the weight's dtype, one more that it is added to, and a sum of rows with their logits.
            rows = self._chunk() * ROWS_OF_SUMS // model.embedding_dim
            peaks.append(kept + min(2, heads) * weights * self.width + (ROWS_OF_SUMS + 2 * rows) * _FLOAT32)
        peaks += [below + point for layer in _of_each_kind(self) for point in self.points(layer)]
        return Activations(
            kept=kept,
            kept_on_host=self.tokens * on_host,
            kept_on_disk=self.tokens * on_disk,
            passing=max(0, max(peaks) - kept),
        )

    def kept_of_layers(self) -> tuple[int, int, int]:
        """Bytes of all layers, without a head, that are kept on the device, on the host and on a disk."""
        model = self.model
        on_device, on_host, on_disk, stream = _places(self, [self.kept_of(layer) for layer in range(model.num_layers)])
        shared = self.tokens * (model.head_dim * _FLOAT32 + 64)
        return self.tokens * (sum(on_device) + stream) + shared, self.tokens * on_host, self.tokens * on_disk

    def points(self, layer: int) -> list[int]:
        """Bytes at the points of a layer's backward where it may be largest."""
        model, core = self.model, self.core(layer)
        if self.chunked:
            return [self._ffn_of_chunk(layer), self._attention_by_groups(layer)]
        again = 0
        if self.config.train.keep != "all":
            # What a second run saves: inputs of both norms and parts, queries, keys and values.
            again = 3 * self.x + self.before_core(layer) + core.behind
        if self.config.train.keep == "inputs":
            again += core.out + core.lse
        ffn = self.tokens * again + _ffn(self, layer, self.tokens)
        if model.has_experts(layer):
            ffn += self.tokens * self.x
        # The FFN's inputs are gone by then, and so are plain copies of queries, keys and values.
        norms = self.before_core(layer) - core.q - core.kv
        attention = self.tokens * (self.x + norms + self._core_backward(layer))
        if self.config.train.keep == "all":
            attention -= self.tokens * (2 * self.x + self.saved_of_ffn(layer) + self.before_core(layer) + core.behind)
        return [ffn, attention]

    def _core_backward(self, layer: int, groups: tuple[int, int] = (1, 1)) -> int:
        """Bytes of a core's backward, queries, keys and values with it, but not the kept output.

        ``groups`` are those that queries, and keys, go through it in. Factors are those that traces of the ring have: a
        rank in its middle has more keys under way, the last one more queries at once.
        """
        core = self.core(layer).of_group(*groups)
        if self.is_delta(layer):
            # Inputs, their gradients and the output's; what a block computes anew does not grow with the tokens.
            return 2 * (core.q + core.kv + core.out)
        heads, keys, model = core.q + core.out, core.kv, self.model
        padded = 0
        if model.value_dim != model.head_dim:
            # Values, their gradients, and attention's output and its gradient, as wide as queries.
            padded = 2 * model.num_kv_heads * model.head_dim * self.width // groups[1] + core.q
        if self.ring == 1 and self.device_type == "cpu":
            # Block by block; gradients in float32, then as they are handed on.
            grads = (core.q + keys) * _FLOAT32 // self.width
            if self.width < _FLOAT32:
                grads += core.q + keys
            return core.q + keys + core.out + grads + padded
        within = _within_kernel(self, layer, groups) + padded
        if self.ring == 1:
            return max(5 * heads // 2 + 4 * keys + padded, within)
        if self.config.parallel.transport == "all_gather":
            # All keys and values at once, and their gradients in float32.
            keys += core.kv * (self.ring - 1) * (1 + 2 * _FLOAT32 // self.width) // 8
        return max(max(11 * heads // 4 + 12 * keys, 7 * heads // 2 + 17 * keys // 2) + padded, within)

    def _ffn_of_chunk(self, layer: int) -> int:
        chunk = self._chunk()
        core = self.core(layer)
        saved = 6 * self.x + self.before_core(layer) + core.out + core.behind
        # The input's gradient takes the place of the output's, chunk by chunk.
        ffn = 2 * chunk * saved + _ffn(self, layer, chunk) + self._stored(self.x + core.out)
        return ffn + _weight_sums(self, layer)

    def _chunk(self) -> int:
        return min(self.config.train.chunk_tokens, self.tokens)

    def _attention_by_groups(self, layer: int) -> int:
        # The next group's are on their way, or this one's are where they are stored.
        core = self.core(layer)
        passed = core.q + core.kv + core.out
        groups = self._groups(layer)
        one = core.of_group(*groups)
        arriving = one.q + one.kv + 2 * one.out + one.lse
        if self.config.train.store == "device":
            arriving = -(one.q + one.kv + one.out)
        if groups[0] > groups[1]:
            # The gradients of keys and values that several groups read, in float32.
            arriving += one.kv * _FLOAT32 // self.width
        of_group = self.tokens * (arriving + self._core_backward(layer, groups))
        stored = self._stored(self.x + passed)
        if self.config.train.store == "host" and self.device_type == "cpu":
            # The machine's memory, too, is the device's.
            stored = self.tokens * passed
        return of_group + stored + _weight_sums(self, layer)

    def _groups(self, layer: int) -> tuple[int, int]:
        """The groups that a layer's query heads, and its key heads, go through its core in."""
        mixer, wanted = layer_specs(self.model)[layer].mixer, self.config.train.head_groups
        if isinstance(mixer, GatedDelta):
            one = groups_of(self.model.delta_sizes.key_heads, wanted)
            return one, one
        key_heads = mixer.key_heads(self.model).num_heads
        if self.model.is_latent:
            key_heads = self.model.num_heads
        return groups_of(self.model.num_heads, wanted), groups_of(key_heads, wanted)

    def _stored(self, per_token: int) -> int:
        """What passes between a layer's parts, where the device is the store."""
        if self.config.train.store != "device":
            return 0
        return self.tokens * per_token


def _ffn(layers: _Layers, layer: int, tokens: int) -> int:
    """Bytes that backward of an FFN adds to its normed input and its output's gradient, tokens of one call."""
    model, width = layers.model, layers.width
    if not model.has_experts(layer):
        factors = 3
        if layers.config.train.keep != "all" or layers.chunked:
            factors += layers.inputs_of_activation()
        return factors * model.ffn_size * width * tokens + model.ffn_size * layers.x
    return _experts(layers, tokens)


def _experts(layers: _Layers, tokens: int) -> int:
    """The same of a layer of experts: assignments are gathered, and weights' gradients formed."""
    model, width = layers.model, layers.width
    tile = min(layers.config.parallel.expert_tile_tokens or tokens, tokens)
    assignments = tile * model.experts_per_token
    inner = model.expert_ffn_size * width
    # Behind the second product: gate, up, their gradients, these side by side; tokens, and gradients of the output.
    of_tile = assignments * (6 * inner + 2 * layers.x)
    weights = 3 * model.num_experts // layers.config.parallel.expert * model.expert_ffn_size * model.hidden_size
    sums, bytes_of_weights = 0, width
    if tile < tokens:
        sums, bytes_of_weights = tokens * 2 * model.hidden_size * _FLOAT32, width + _FLOAT32
    shared = 5 * model.shared_ffn_size * width * tokens
    return max(of_tile, shared) + sums + weights * bytes_of_weights


def _weight_sums(layers: _Layers, layer: int) -> int:
    """Sums of a layer's gradients over chunks."""
    return num_layer_parameters(layers.config, layer) * _FLOAT32


def _of_each_kind(layers: _Layers) -> set[int]:
    """The first and the last layer, and one with each mixer."""
    specs = layer_specs(layers.model)
    return {0, len(specs) - 1} | set({spec.mixer: n for n, spec in enumerate(specs)}.values())


def _kept_ahead(layers: _Layers) -> int:
    """Bytes a token that are kept between the blocks for multi-token prediction."""
    # Inputs of three norms, and of the projection, which is twice as wide.
    kept = 5 * layers.x
    if layers.chunked:
        # What entered, what it stands beside, and the branch.
        kept = 3 * layers.x
    return layers.model.mtp_layers * kept


def _places(layers: _Layers, kept: list[int], ahead: int = 0) -> tuple[list[int], int, int, int]:
    """What of layers lies on the device, on the host and on a disk, and what stays on the device beside them.

    That is the residual stream, and what is kept ``ahead`` of the last layer; in stores it lies where layers do.
    """
    train = layers.config.train
    if train.store == "disk":
        return [], 0, sum(kept) + layers.x + ahead, 0
    if train.store == "host" and layers.chunked:
        return [], sum(kept) + layers.x + ahead, 0, 0
    if train.store == "host":
        return kept[-1:], sum(kept[:-1]), 0, layers.x + ahead
    return list(kept), 0, 0, layers.x + ahead


def _within_kernel(layers: _Layers, layer: int, groups: tuple[int, int]) -> int:
    """Return bytes a token that are held while the kernel's backward runs in a layer.

    Gradients lie beside queries, keys and values; the kept output does not count, and the workspace comes on top.
    """
    model, mixer = layers.model, layer_specs(layers.model)[layer].mixer
    core = layers.core(layer).of_group(*groups)
    held = 2 * (core.q + core.kv) + core.out + core.lse // 2
    if layers.ring > 1:
        # Sums over hops in float32, and the keys and values of the next hop.
        held += (core.q + core.kv) * _FLOAT32 // layers.width + 2 * core.kv
    keys, value_dim = mixer.key_heads(model), model.value_dim
    if isinstance(mixer, Softmax) and mixer.has_own_heads:
        value_dim = keys.head_dim
    call = BackwardCall(
        num_queries=layers.tokens,
        num_keys=layers.tokens,
        num_sequences=layers.num_documents,
        num_heads=model.num_heads // groups[0],
        num_kv_heads=keys.num_heads // groups[1],
        head_dim=keys.head_dim,
        value_dim=value_dim,
        itemsize=layers.width,
    )
    return held + backward_workspace(expected_kernel(layers.config), call) // layers.tokens


def sums_head_by_rows(config: ResolvedConfig, model: ModelConfig) -> bool:
    """Whether the gradient of the head's weight is summed some rows at a time, whose logits are computed again."""
    is_large = model.vocab_size * model.embedding_dim > ROWS_OF_SUMS
    return bool(config.train.chunk_tokens) and is_large and not model.head_bias


def loss_bytes(config: ResolvedConfig, tokens: int, device_type: str) -> int:
    """Bytes beside the gradients of hidden states and head, for so many tokens of a rank."""
    tokens = math.ceil(tokens * config.head_share)
    if device_type == "cpu":
        return _on_cpu(config, tokens)
    logits = min(_LOGITS_OF_GPU, tokens * config.model.vocab_size)
    chunk = logits * config.dtype.itemsize
    # Eager, a block's copies in float32; compiled, the gradient of the whole chunk.
    return chunk + max(3 * min(_BLOCK_OF_GPU, logits) * _FLOAT32, chunk)


def _on_cpu(config: ResolvedConfig, tokens: int) -> int:
    """Where blocks fit a cache: a chunk's logits and its own gradient, normed hidden states, products of the head."""
    model, width = config.model.config(), config.dtype.itemsize
    vocab_size, model_width = model.vocab_size, model.embedding_dim
    normed, head = tokens * model.hidden_size * width, 0
    if model.head_transform:
        # The projection, its activation, and what the norm makes of it.
        normed += 3 * tokens * model_width * width
    chunk = min(tokens_of_chunk(vocab_size, model_width, "cpu"), tokens)
    if width < _FLOAT32 and config.train.products == "float32":
        # Tiles of the head's weight and the chunk's hidden states, converted.
        head = 2 * min(TILE_ELEMENTS, vocab_size * model_width) * _FLOAT32 + chunk * model_width * _FLOAT32
        width = _FLOAT32
    elif width < _FLOAT32:
        head = vocab_size * model_width * width
    return chunk * (vocab_size + model_width) * width + head + normed
