"""Named shapes for ``model.preset``: small ones to start from, and published models."""

from __future__ import annotations

from longctx.architecture.rope import Rope
from longctx.config import ModelConfig

_QUICKSTART = {
    "quickstart": ModelConfig(
        num_layers=2, num_experts=8, expert_ffn_size=128, shared_ffn_size=256, balance_loss_weight=0.01
    ),
    "quickstart-dense": ModelConfig(num_layers=2),
}

_GPT = {
    "gpt-1": ModelConfig(  # Radford et al. 2018
        vocab_size=40_478,
        hidden_size=768,
        num_layers=12,
        num_heads=12,
        num_kv_heads=12,
        max_positions=512,
        o_bias=True,
        position="learned",
        norm="layernorm",
        norm_order="post",
        norm_eps=1e-5,
        activation="gelu_tanh",
        ffn_size=3072,
        ffn_bias=True,
        residual_dropout=0.1,
    ),
    "gpt2-xl": ModelConfig(  # Radford et al. 2019
        vocab_size=50_257,
        hidden_size=1600,
        num_layers=48,
        num_heads=25,
        num_kv_heads=25,
        max_positions=1024,
        o_bias=True,
        position="learned",
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu_tanh",
        ffn_size=6400,
        ffn_bias=True,
        residual_dropout=0.1,
    ),
    # arXiv 2005.14165, table 2.1. Every other layer is banded there, by a width that was not published: all are full
    # here. Whether the head is tied was not said either; the usual count of 175 billion has one of its own.
    "gpt-3": ModelConfig(
        vocab_size=50_257,
        hidden_size=12_288,
        num_layers=96,
        num_heads=96,
        num_kv_heads=96,
        head_dim=128,
        max_positions=2048,
        o_bias=True,
        position="learned",
        norm="layernorm",
        norm_eps=1e-5,
        activation="gelu_tanh",
        ffn_size=49_152,
        ffn_bias=True,
        tie_embeddings=False,
    ),
}

_LLAMA = {
    "llama-2-7b": ModelConfig(  # arXiv 2307.09288
        vocab_size=32_000,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        max_positions=4096,
        qkv_bias=False,
        norm_eps=1e-5,
        ffn_size=11_008,
        tie_embeddings=False,
    ),
    "llama-3.1-8b": ModelConfig(  # arXiv 2407.21783
        vocab_size=128_256,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=131_072,
        qkv_bias=False,
        rope=Rope(kind="llama3", theta=500_000.0, factor=8.0, original_max_positions=8192),
        norm_eps=1e-5,
        ffn_size=14_336,
        tie_embeddings=False,
    ),
}

_EXPERTS = {
    "mixtral-8x7b": ModelConfig(  # arXiv 2401.04088
        vocab_size=32_000,
        hidden_size=4096,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        max_positions=32_768,
        qkv_bias=False,
        rope=Rope(theta=1e6),
        norm_eps=1e-5,
        num_experts=8,
        experts_per_token=2,
        expert_ffn_size=14_336,
        balance_loss_weight=0.02,
        tie_embeddings=False,
    ),
    "qwen3-30b-a3b": ModelConfig(  # arXiv 2505.09388
        vocab_size=151_936,
        hidden_size=2048,
        num_layers=48,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        max_positions=40_960,
        qkv_bias=False,
        qk_norm="head",
        rope=Rope(theta=1e6),
        num_experts=128,
        experts_per_token=8,
        expert_ffn_size=768,
        tie_embeddings=False,
    ),
    "deepseek-v3": ModelConfig(  # arXiv 2412.19437, without the layer that predicts a second token
        vocab_size=129_280,
        hidden_size=7168,
        num_layers=61,
        num_heads=128,
        num_kv_heads=128,
        head_dim=192,
        max_positions=163_840,
        qkv_bias=False,
        q_lora_rank=1536,
        kv_lora_rank=512,
        rope_head_dim=64,
        value_head_dim=128,
        rope=Rope(
            kind="yarn", factor=40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0, interleaved=True
        ),
        ffn_size=18_432,
        num_experts=256,
        experts_per_token=8,
        expert_ffn_size=2048,
        shared_ffn_size=2048,
        shared_gate=False,
        dense_layers=(0, 1, 2),
        score_function="sigmoid",
        selection_bias=True,
        expert_groups=8,
        groups_per_token=4,
        routed_scale=2.5,
        balance_loss_weight=0.0001,
        tie_embeddings=False,
    ),
}

PRESETS: dict[str, ModelConfig] = {**_QUICKSTART, **_GPT, **_LLAMA, **_EXPERTS}
"""Sizes to start from; every field may be changed beside the name."""
