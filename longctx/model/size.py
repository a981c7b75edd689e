"""How many parameters a model has, by arithmetic alone."""

from __future__ import annotations

from longctx.config import ModelConfig


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters by component; the values add up to the decoder's total, a tied head counting 0."""
    L, M, V = config.num_layers, config.hidden_size, config.vocab_size
    query, key_value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    E, sparse = config.num_experts, config.num_experts > 0
    shared = 3 * M * config.shared_ffn_size + M if config.shared_ffn_size else 0  # with the gate of one row
    return {
        "embedding": V * M,
        "attention": L * (2 * M * query + 2 * M * key_value + config.qkv_bias * (query + 2 * key_value)),
        "dense_ffn": 0 if sparse else L * 3 * M * config.ffn_size,
        "router": L * E * M,
        "routed_experts": L * E * 3 * M * config.expert_ffn_size,
        "shared_expert": L * shared if sparse else 0,
        "norms": (2 * L + 1) * M,
        "head": 0 if config.tie_embeddings else V * M,
    }
