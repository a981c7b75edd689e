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

    ``active`` counts of the routed experts only the ``experts_per_token`` that one token visits, as the "A3B" of
    Qwen3-30B-A3B does. The router's selection bias is no parameter: it is set by a rule and not by gradients.
    """
    vectors = _sum(config, _block_vectors)
    if config.norm_order != "post":
        vectors["norms"] += _norm_size(config, config.hidden_size)
    vectors["positions"] += _position_table(config)
    counts = Counter(count_matrices(config)) + vectors
    if active:
        counts["routed_experts"] = _visited(config, counts["routed_experts"])
    return {name: counts[name] for name in COMPONENTS}


def count_matrices(config: ModelFields, *, active: bool = False) -> dict[str, int]:
    """Weight matrices by component: no norms, biases, sinks, and no tables of positions, which are only looked up.

    GPT-3's "175 billion" is their sum. ``active`` as in ``count_parameters``.
    """
    counts = _sum(config, _block_matrices)
    table = config.vocab_size * config.hidden_size
    counts.update(embedding=table, head=0 if config.tie_embeddings else table)
    if active:
        counts["routed_experts"] = _visited(config, counts["routed_experts"])
    return {name: counts[name] for name in COMPONENTS if name != "norms"}


def _visited(config: ModelFields, routed: int) -> int:
    """Of all routed experts' parameters, those of the experts that one token visits."""
    return routed // config.num_experts * config.experts_per_token if config.num_experts else 0


def _sum(config: ModelFields, of_block: Callable[[ModelFields, int], dict[str, int]]) -> Counter[str]:
    total: Counter[str] = Counter()
    for layer in range(config.num_layers):
        total.update(of_block(config, layer))
    return total


def _position_table(config: ModelFields) -> int:
    if config.position == "learned":
        return config.max_positions * config.hidden_size
    return config.relative_buckets * config.num_heads if config.position == "t5" else 0


# ---------------------------------------------------------------------------------------------------------- matrices


def _block_matrices(config: ModelFields, layer: int) -> dict[str, int]:
    M, H, D = config.hidden_size, config.num_heads, config.head_dim
    attention = _latent_matrices(config) if config.is_latent else 2 * M * D * (H + config.num_kv_heads)
    relative = {"positions": H * D * M} if config.position == "relative" else {}
    return {"attention": attention, **relative, **_ffn_matrices(config, layer)}


def _latent_matrices(config: ModelFields) -> int:
    M, H, D, V = config.hidden_size, config.num_heads, config.head_dim, config.value_dim
    latent, turned = config.kv_lora_rank, config.rope_head_dim
    queries = config.q_lora_rank * (M + H * D) if config.q_lora_rank else M * H * D
    keys_and_values = M * (latent + turned) + latent * H * (D - turned + V)
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
        "positions": 2 * H * D if config.position == "relative" else 0,
        "norms": _block_norms(config),
        **_ffn_biases(config, layer),
    }


def _attention_biases(config: ModelFields) -> int:
    """With latent attention the biases are those of the projections into latents."""
    output = config.hidden_size if config.o_bias else 0
    if not config.qkv_bias:
        return output
    if config.is_latent:
        return output + config.q_lora_rank + config.kv_lora_rank + config.rope_head_dim
    return output + (config.num_heads + 2 * config.num_kv_heads) * config.head_dim


def _block_norms(config: ModelFields) -> int:
    around_parts = (4 if config.norm_order == "sandwich" else 2) * _norm_size(config, config.hidden_size)
    if config.is_latent:
        return around_parts + config.q_lora_rank + config.kv_lora_rank  # always RMSNorms
    if config.qk_norm == "none":
        return around_parts
    whole = config.qk_norm == "full"
    queries, keys = (config.num_heads, config.num_kv_heads) if whole else (1, 1)
    return around_parts + _norm_size(config, (queries + keys) * config.head_dim)


def _norm_size(config: ModelFields, channels: int) -> int:
    return 2 * channels if config.norm == "layernorm" else channels


def _ffn_biases(config: ModelFields, layer: int) -> dict[str, int]:
    M, E, inner = config.hidden_size, config.num_experts, 2 if config.activation in GATED else 1
    if not config.has_experts(layer):
        return {"dense_ffn": inner * config.ffn_size + M if config.ffn_bias else 0}
    return {
        "router": E if config.router_bias else 0,
        "routed_experts": E * (inner * config.expert_ffn_size + M) if config.expert_bias else 0,
    }
