"""Parameter counts by arithmetic, without allocating tensors.

Axes: M model width, H query heads, K key/value heads, D query/key head size, V value head size, F FFN width, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from longctx.architecture.fields import ModelFields, encoder_of
from longctx.architecture.image_stages import stage_configs
from longctx.architecture.layer_specs import layer_specs
from longctx.architecture.mixers.mixer import norm_size
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer, sinks
from longctx.architecture.model_rules import GATED

CROSS = SoftmaxMixer(causal=False)
"""Cross attention uses softmax attention's projections."""

COMPONENTS = (
    "embedding",
    "positions",
    "attention",
    "dense_ffn",
    "router",
    "routed_experts",
    "shared_expert",
    "merging",
    "mtp",
    "norms",
    "head",
)
"""Keys in parameter counts. ``positions``: position tables and Transformer-XL's relative weights; ``merging``:
projections of four patches between stages; ``mtp``: input projections in multi-token prediction blocks."""


def count_parameters(config: ModelFields, *, active: bool = False) -> dict[str, int]:
    """Count parameters by component; the values add up to the model's total, a tied head counting 0.

    With ``active``, routed experts count only the ``experts_per_token`` that one token uses, like the "A3B" in
    Qwen3-30B-A3B. The router's selection bias is excluded: a rule updates it instead of gradients.
    """
    vectors = _sum(config, _block_vectors)
    # A post-norm block ends in a norm, so the stack needs no final one.
    if config.norm_order != "post":
        vectors["norms"] += norm_size(config, config.output_width)
    # A merging norms four patches together.
    vectors["norms"] += sum(norm_size(config, 4 * stage.hidden_size) for stage in stage_configs(config)[:-1])
    # An MTP block norms both its inputs and its output.
    vectors["norms"] += 3 * config.mtp_layers * norm_size(config, config.hidden_size)
    vectors["positions"] += _position_table(config)
    _add_front(config, vectors)
    _add_head(config, vectors)
    if config.encoder_layers:
        vectors.update(_encoder_vectors(encoder_of(config)))
    # Adding Counters drops zeros; the last line restores them.
    counts = Counter(count_matrices(config)) + vectors
    if active:
        counts["routed_experts"] = _active(config, counts["routed_experts"])
    return {name: counts[name] for name in COMPONENTS}


def count_matrices(config: ModelFields, *, active: bool = False, uses: bool = False) -> dict[str, int]:
    """Count matrix weights by component, without norms, biases, sinks and position tables (lookups).

    Their sum is GPT-3's "175 billion". ``active`` as in ``count_parameters``; with ``uses``, shared layers count once
    per layer.
    """
    counts = _sum(config, _block_matrices, uses=uses)
    if config.encoder_layers:
        counts.update(_sum(encoder_of(config), _block_matrices))
    E = config.embedding_dim
    # An MTP block projects [hidden state, next token's embedding] from 2·M to M.
    counts["mtp"] = 2 * config.mtp_layers * config.hidden_size**2
    counts["merging"] = sum(merging_size(stage) for stage in stage_configs(config)[:-1])
    counts["embedding"] = config.vocab_size * E + config.image.pixel_bytes * E
    if not config.tie_embeddings:
        counts["head"] = config.head_rows * E
    if config.embedding_size:
        # The encoder has its own projection from E to M.
        counts["embedding"] += E * config.hidden_size * (2 if config.encoder_layers else 1)
    if config.head_transform:
        counts["head"] += config.hidden_size * E
    counts["head"] += document_head_size(config)
    if active:
        counts["routed_experts"] = _active(config, counts["routed_experts"])
    return {name: counts[name] for name in COMPONENTS if name != "norms"}


def document_head_size(config: ModelFields) -> int:
    """Count the matrix weights of pair head and class head, which apply once per document."""
    size = config.output_width * config.classes
    if config.pair_head != "none":
        # BERT's pooler (M × M), then two logits.
        size += config.hidden_size * (config.hidden_size + 2)
    return size


def unread_size(config: ModelFields) -> int:
    """Count the last layer's matrix weights after attention that only a class head's tokens need; 0 if all need them.

    Routers count all tokens.
    """
    last = config.num_layers - 1
    is_only = config.classes and config.class_pool == "first" and not config.predicts_tokens
    if not is_only or config.has_experts(last):
        return 0
    size = _ffn(config, last)[0]["dense_ffn"]
    if isinstance(layer_specs(config)[last].mixer, SoftmaxMixer):
        size += config.num_heads * config.value_dim * config.hidden_size
    return size


def merging_size(stage: ModelFields) -> int:
    """Count the matrix weights in the merging after a stage: from four patches' channels, 4·M, to 2·M."""
    return 8 * stage.hidden_size**2


def _active(config: ModelFields, routed: int) -> int:
    """Return the routed experts' parameters that one token uses."""
    if not config.num_experts:
        return 0
    # Exact: routed experts have the same size in all layers.
    return routed // config.num_experts * config.experts_per_token


def _sum(
    config: ModelFields, of_block: Callable[[ModelFields, int], dict[str, int]], *, uses: bool = False
) -> Counter[str]:
    """Sum parameters by component over all blocks; shared ones count once, or with ``uses`` once per use."""
    total: Counter[str] = Counter()
    for stage in stage_configs(config) or (config,):
        for layer in range(stage.depth):
            # Shared layers are one block, which layer 0 has counted.
            if layer and stage.shared_layers and not uses:
                break
            total.update(of_block(stage, layer))
    return total


def _position_table(config: ModelFields) -> int:
    """Count parameters in the position table that all layers read."""
    if config.position == "learned":
        return (config.max_positions + config.position_offset) * config.embedding_dim
    if config.position == "t5":
        return config.relative_buckets * config.num_heads
    return 0


def _encoder_vectors(encoder: ModelFields) -> Counter[str]:
    """Count an encoder's parameters, without matrices."""
    vectors = _sum(encoder, _block_vectors)
    if encoder.norm_order != "post":
        vectors["norms"] += norm_size(encoder, encoder.hidden_size)
    vectors["positions"] += _position_table(encoder)
    _add_front(encoder, vectors)
    return vectors


def _add_front(config: ModelFields, counts: Counter[str]) -> None:
    """Add the parameters before the first layer, without matrices."""
    E = config.embedding_dim
    counts["embedding"] += config.segments * E
    if config.image.patch:
        # The patch projection's bias, and the class token.
        counts["embedding"] += E * (1 + config.image.class_token)
    if config.embedding_size:
        counts["embedding"] += config.hidden_size
    if config.embedding_norm:
        counts["norms"] += norm_size(config, E)


def _add_head(config: ModelFields, counts: Counter[str]) -> None:
    """Add the head's parameters, without matrices."""
    E = config.embedding_dim
    if config.head_transform:
        counts["head"] += E
        counts["norms"] += norm_size(config, E)
    if config.head_bias:
        counts["head"] += config.head_rows
    if config.pair_head != "none":
        counts["head"] += config.hidden_size + 2
    counts["head"] += config.classes * config.class_bias


def widest_ffn(config: ModelFields) -> int:
    """Return the widest FFN's inner values per token, over experts and the dense FFN."""
    if not config.num_experts:
        return config.ffn_size
    # A token's experts run together, so their widths add up.
    widths = [config.experts_per_token * config.expert_ffn_size, config.shared_ffn_size]
    if config.dense_layers:
        widths.append(config.ffn_size)
    return max(widths)


def _block_matrices(config: ModelFields, layer: int) -> dict[str, int]:
    """Count one layer's matrix weights."""
    counts, _ = _ffn(config, layer)
    counts["attention"] = layer_specs(config)[layer].mixer.matrices(config)
    if config.encoder_layers:
        counts["attention"] += CROSS.matrices(config)
    if config.position == "relative":
        # Transformer-XL projects sinusoidal distances for each head.
        counts["positions"] = config.num_heads * config.head_dim * config.hidden_size
    return counts


def _block_vectors(config: ModelFields, layer: int) -> dict[str, int]:
    """Count one layer's biases, sinks, norms and position vectors."""
    _, counts = _ffn(config, layer)
    # Norms around attention and FFN; the mixer counts those inside attention.
    num_norms = 4 if config.norm_order == "sandwich" else 2
    mixer = layer_specs(config)[layer].mixer
    counts["norms"] = num_norms * norm_size(config, config.hidden_size) + mixer.norms(config)
    counts["attention"] = mixer.vectors(config)
    if config.encoder_layers:
        counts["norms"] += norm_size(config, config.hidden_size) + CROSS.norms(config)
        # Cross attention has no sinks: its softmax covers encoder tokens only.
        counts["attention"] += CROSS.vectors(config) - sinks(config)
    if config.position == "relative":
        # Transformer-XL's u and v, added to queries for content and distance scores.
        counts["positions"] = 2 * config.num_heads * config.head_dim
    return counts


def _ffn(config: ModelFields, layer: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return matrix weights and biases for a layer's dense FFN, or for its router and experts.

    The shared expert has no bias.
    """
    M, E = config.hidden_size, config.num_experts
    # Up and down projections; a gated activation adds a gate projection.
    inner = 2 if config.activation in GATED else 1
    projections = inner + 1
    if not config.has_experts(layer):
        biases = (inner * config.ffn_size + M) * config.ffn_bias
        return {"dense_ffn": projections * M * config.ffn_size}, {"dense_ffn": biases}
    shared = projections * M * config.shared_ffn_size
    if config.shared_ffn_size and config.shared_gate:
        # One gate logit per token.
        shared += M
    routed = E * projections * M * config.expert_ffn_size
    routed_biases = E * (inner * config.expert_ffn_size + M) * config.expert_bias
    return (
        {"router": E * M, "routed_experts": routed, "shared_expert": shared},
        {"router": E * config.router_bias, "routed_experts": routed_biases},
    )
