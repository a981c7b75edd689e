"""Parameter counts of a model, by arithmetic alone: nothing is allocated, at any size.

Axes: M model width, H query heads, K key/value heads, D query/key head size, V value head size, F FFN width, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from longctx.architecture.fields import ModelFields, encoder_of
from longctx.architecture.layers import layer_specs
from longctx.architecture.mixers.mixer import norm_size
from longctx.architecture.mixers.softmax import Softmax, sinks
from longctx.architecture.rules import GATED

CROSS = Softmax(causal=False)
"""Projections of cross attention are those of softmax attention."""

COMPONENTS = (
    "embedding",
    "positions",
    "attention",
    "dense_ffn",
    "router",
    "routed_experts",
    "shared_expert",
    "mtp",
    "norms",
    "head",
)
"""What parameters are counted by. ``positions`` are tables of positions and Transformer-XL's relative weights, ``mtp``
the projections before the blocks for multi-token prediction."""


def count_parameters(config: ModelFields, *, active: bool = False) -> dict[str, int]:
    """Return the number of parameters by component; the values add up to the decoder's total, a tied head counting 0.

    With ``active``, routed experts count only the ``experts_per_token`` that one token is routed to, like the "A3B" of
    Qwen3-30B-A3B. The router's selection bias is not a parameter: it is updated by a rule instead of gradients.
    """
    vectors = _sum(config, _block_vectors)
    # With norms after each sum, the last block already ends in one.
    if config.norm_order != "post":
        vectors["norms"] += norm_size(config, config.hidden_size)
    # Norms of such a block's two inputs, and after it.
    vectors["norms"] += 3 * config.mtp_layers * norm_size(config, config.hidden_size)
    vectors["positions"] += _position_table(config)
    _add_front(config, vectors)
    _add_head(config, vectors)
    if config.encoder_layers:
        vectors.update(_encoder_vectors(encoder_of(config)))
    counts = Counter(count_matrices(config)) + vectors
    if active:
        counts["routed_experts"] = _active(config, counts["routed_experts"])
    return {name: counts[name] for name in COMPONENTS}


def count_matrices(config: ModelFields, *, active: bool = False, uses: bool = False) -> dict[str, int]:
    """Return the number of matrix weights by component: no norms, biases, sinks or position tables (lookups).

    GPT-3's "175 billion" is their sum. ``active`` as in ``count_parameters``; with ``uses``, shared layers count once
    per layer.
    """
    counts = _sum(config, _block_matrices, uses=uses)
    if config.encoder_layers:
        counts.update(_sum(encoder_of(config), _block_matrices))
    E = config.embedding_dim
    counts["mtp"] = 2 * config.mtp_layers * config.hidden_size**2
    counts["embedding"] = config.vocab_size * E
    if not config.tie_embeddings:
        counts["head"] = counts["embedding"]
    if config.embedding_size:
        # The encoder has its own projection.
        counts["embedding"] += E * config.hidden_size * (2 if config.encoder_layers else 1)
    if config.head_transform:
        counts["head"] += config.hidden_size * E
    if config.pair_head != "none":
        counts["head"] += pair_head_size(config)
    if active:
        counts["routed_experts"] = _active(config, counts["routed_experts"])
    return {name: counts[name] for name in COMPONENTS if name != "norms"}


def pair_head_size(config: ModelFields) -> int:
    """Return the number of weights in the pair head's matrices, which are applied only to a document's first token."""
    return config.hidden_size * (config.hidden_size + 2)


def _active(config: ModelFields, routed: int) -> int:
    """Return the part of all routed experts' parameters that belongs to the experts of one token."""
    if not config.num_experts:
        return 0
    # Exact: all experts of all layers have the same size.
    return routed // config.num_experts * config.experts_per_token


def _sum(
    config: ModelFields, of_block: Callable[[ModelFields, int], dict[str, int]], *, uses: bool = False
) -> Counter[str]:
    """Return parameters by component over all blocks; shared ones count once, or with ``uses`` once per use."""
    total: Counter[str] = Counter()
    for layer in range(config.depth):
        if layer and config.shared_layers and not uses:
            break
        total.update(of_block(config, layer))
    return total


def _position_table(config: ModelFields) -> int:
    """Return the number of parameters in the one table of positions that all layers read."""
    if config.position == "learned":
        return (config.max_positions + config.position_offset) * config.embedding_dim
    if config.position == "t5":
        return config.relative_buckets * config.num_heads
    return 0


def _encoder_vectors(encoder: ModelFields) -> Counter[str]:
    """Return the number of an encoder's parameters, without its matrices."""
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
    if config.embedding_size:
        counts["embedding"] += config.hidden_size
    if config.embedding_norm:
        counts["norms"] += norm_size(config, E)


def _add_head(config: ModelFields, counts: Counter[str]) -> None:
    """Add the parameters of the head, without matrices."""
    E = config.embedding_dim
    if config.head_transform:
        counts["head"] += E
        counts["norms"] += norm_size(config, E)
    if config.head_bias:
        counts["head"] += config.vocab_size
    if config.pair_head != "none":
        counts["head"] += config.hidden_size + 2


def widest_ffn(config: ModelFields) -> int:
    """Return the number of inner values per token in the widest FFN: experts and the dense FFN, if present."""
    if not config.num_experts:
        return config.ffn_size
    # All experts of a token are computed together.
    widths = [config.experts_per_token * config.expert_ffn_size, config.shared_ffn_size]
    if config.dense_layers:
        widths.append(config.ffn_size)
    return max(widths)


def _block_matrices(config: ModelFields, layer: int) -> dict[str, int]:
    """Return the number of matrix weights in one layer."""
    counts, _ = _ffn(config, layer)
    counts["attention"] = layer_specs(config)[layer].mixer.matrices(config)
    if config.encoder_layers:
        counts["attention"] += CROSS.matrices(config)
    if config.position == "relative":
        # Transformer-XL projects the sinusoids of distances for each head.
        counts["positions"] = config.num_heads * config.head_dim * config.hidden_size
    return counts


def _block_vectors(config: ModelFields, layer: int) -> dict[str, int]:
    """Return the number of weights in one layer's biases, sinks, norms and position vectors."""
    _, counts = _ffn(config, layer)
    # Norms around attention and FFN, and inside attention.
    num_norms = 4 if config.norm_order == "sandwich" else 2
    mixer = layer_specs(config)[layer].mixer
    counts["norms"] = num_norms * norm_size(config, config.hidden_size) + mixer.norms(config)
    counts["attention"] = mixer.vectors(config)
    if config.encoder_layers:
        counts["norms"] += norm_size(config, config.hidden_size) + CROSS.norms(config)
        counts["attention"] += CROSS.vectors(config) - sinks(config)
    if config.position == "relative":
        # Transformer-XL's u and v.
        counts["positions"] = 2 * config.num_heads * config.head_dim
    return counts


def _ffn(config: ModelFields, layer: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return matrix weights and biases of a layer's dense FFN, or of its router and experts.

    The shared expert has no bias.
    """
    M, E = config.hidden_size, config.num_experts
    # Up; a gated activation has a gate projection too. Then down.
    inner = 2 if config.activation in GATED else 1
    projections = inner + 1
    if not config.has_experts(layer):
        biases = (inner * config.ffn_size + M) * config.ffn_bias
        return {"dense_ffn": projections * M * config.ffn_size}, {"dense_ffn": biases}
    shared = projections * M * config.shared_ffn_size
    if config.shared_ffn_size and config.shared_gate:
        shared += M
    routed = E * projections * M * config.expert_ffn_size
    routed_biases = E * (inner * config.expert_ffn_size + M) * config.expert_bias
    return (
        {"router": E * M, "routed_experts": routed, "shared_expert": shared},
        {"router": E * config.router_bias, "routed_experts": routed_biases},
    )
