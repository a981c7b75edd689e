"""How many parameters a model has, by arithmetic alone: nothing is allocated, whatever the size.

Axes: M model width, H query heads, K key/value heads, D query/key head size, V value head size, F FFN width, E experts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from longctx.architecture.fields import ModelFields
from longctx.architecture.rules import GATED

COMPONENTS = (
    "embedding",
    "positions",
    "attention",
    "dense_ffn",
    "router",
    "routed_experts",
    "shared_expert",
    "norms",
    "head",
)
"""What parameters are counted by. ``positions`` are tables of positions and Transformer-XL's relative weights."""


def count_parameters(config: ModelFields, *, active: bool = False) -> dict[str, int]:
    """Parameters by component; the values add up to the decoder's total, a tied head counting 0.

    ``active`` counts of the routed experts only the ``experts_per_token`` that one token is routed to, as the "A3B" of
    Qwen3-30B-A3B does. The router's selection bias is no parameter: it is set by a rule and not by gradients.
    """
    vectors = _sum(config, _block_vectors)
    if config.norm_order != "post":
        vectors["norms"] += _norm_size(config, config.hidden_size)
    vectors["positions"] += _position_table(config)
    counts = Counter(count_matrices(config)) + vectors
    if active:
        counts["routed_experts"] = _active(config, counts["routed_experts"])
    return {name: counts[name] for name in COMPONENTS}


def count_matrices(config: ModelFields, *, active: bool = False) -> dict[str, int]:
    """Weight matrices by component: no norms, biases, sinks, and no tables of positions, which are only looked up.

    GPT-3's "175 billion" is their sum. ``active`` as in ``count_parameters``.
    """
    counts = _sum(config, _block_matrices)
    table = config.vocab_size * config.hidden_size
    counts.update(embedding=table, head=0 if config.tie_embeddings else table)
    if active:
        counts["routed_experts"] = _active(config, counts["routed_experts"])
    return {name: counts[name] for name in COMPONENTS if name != "norms"}


def _active(config: ModelFields, routed: int) -> int:
    """Of all routed experts' parameters, those of the experts that one token is routed to."""
    if not config.num_experts:
        return 0
    return routed // config.num_experts * config.experts_per_token


def _sum(config: ModelFields, of_block: Callable[[ModelFields, int], dict[str, int]]) -> Counter[str]:
    """Parameters by component, over all layers."""
    total: Counter[str] = Counter()
    for layer in range(config.num_layers):
        total.update(of_block(config, layer))
    return total


def _position_table(config: ModelFields) -> int:
    """Parameters of the one table of positions that all layers read."""
    if config.position == "learned":
        return config.max_positions * config.hidden_size
    if config.position == "t5":
        return config.relative_buckets * config.num_heads
    return 0


# ---------------------------------------------------------------------------------------------------------- matrices


def _block_matrices(config: ModelFields, layer: int) -> dict[str, int]:
    M, H, D = config.hidden_size, config.num_heads, config.head_dim
    if config.is_latent:
        attention = _latent_matrices(config)
    else:
        attention = 2 * M * D * (H + config.num_kv_heads)  # queries and output, keys and values
    positions = H * D * M if config.position == "relative" else 0
    return {"attention": attention, "positions": positions, **_ffn_matrices(config, layer)}


def _latent_matrices(config: ModelFields) -> int:
    M, H, D, V = config.hidden_size, config.num_heads, config.head_dim, config.value_dim
    latent, rotary = config.kv_lora_rank, config.rope_head_dim
    if config.q_lora_rank:
        queries = config.q_lora_rank * (M + H * D)
    else:
        queries = M * H * D
    # Rotary keys are projected from the hidden states, once for all heads; the other channels come from the latent.
    keys_and_values = M * (latent + rotary) + latent * H * (D - rotary + V)
    return queries + keys_and_values + H * V * M


def _ffn_matrices(config: ModelFields, layer: int) -> dict[str, int]:
    M, E = config.hidden_size, config.num_experts
    projections = 3 if config.activation in GATED else 2
    if not config.has_experts(layer):
        return {"dense_ffn": projections * M * config.ffn_size}
    gate = M if config.shared_ffn_size and config.shared_gate else 0
    return {
        "router": E * M,
        "routed_experts": E * projections * M * config.expert_ffn_size,
        "shared_expert": projections * M * config.shared_ffn_size + gate,
    }


# ----------------------------------------------------------------------------------------------------------- vectors


def _block_vectors(config: ModelFields, layer: int) -> dict[str, int]:
    H, D = config.num_heads, config.head_dim
    sinks = H if config.sinks and config.layer_kind(layer) != "linear" else 0
    return {
        "attention": _attention_biases(config) + sinks,
        "positions": 2 * H * D if config.position == "relative" else 0,  # Transformer-XL's u and v
        "norms": _block_norms(config),
        **_ffn_biases(config, layer),
    }


def _attention_biases(config: ModelFields) -> int:
    """Biases of the projections; with latent attention, of those into latents."""
    output = config.hidden_size if config.o_bias else 0
    if not config.qkv_bias:
        return output
    if config.is_latent:
        return output + config.q_lora_rank + config.kv_lora_rank + config.rope_head_dim
    return output + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def _block_norms(config: ModelFields) -> int:
    """Norms around attention and FFN, and inside of attention."""
    around_parts = (4 if config.norm_order == "sandwich" else 2) * _norm_size(config, config.hidden_size)
    if config.is_latent:
        return around_parts + config.q_lora_rank + config.kv_lora_rank  # always RMSNorms
    if config.qk_norm == "none":
        return around_parts
    num_heads = 2  # one head's weights for all queries, one for all keys
    if config.qk_norm == "full":
        num_heads = config.num_heads + config.num_kv_heads
    return around_parts + _norm_size(config, num_heads * config.head_dim)


def _norm_size(config: ModelFields, channels: int) -> int:
    return 2 * channels if config.norm == "layernorm" else channels


def _ffn_biases(config: ModelFields, layer: int) -> dict[str, int]:
    M, E = config.hidden_size, config.num_experts
    inner = 2 if config.activation in GATED else 1
    if not config.has_experts(layer):
        return {"dense_ffn": inner * config.ffn_size + M if config.ffn_bias else 0}
    return {
        "router": E if config.router_bias else 0,
        "routed_experts": E * (inner * config.expert_ffn_size + M) if config.expert_bias else 0,
    }
