"""Llama (2, 3, 3.1) and Mistral, SmolLM3 and Granite."""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    both_biases,
    constant,
    divided_head_dim,
    first_of,
    head_dim,
    kv_heads,
    llama_like,
    only,
    same,
    typed,
    width_of_heads,
)
from longctx.families.layer_rules import full_attention, one_window, rotary_layers
from longctx.families.rope_rules import rotary
from longctx.families.spec import ConfigRule, Family, HfConfig

# Dense families have no key for experts.
DENSE = constant(num_experts=0)

_SHARED = (
    DENSE,
    kv_heads(default_is_heads=True),
    full_attention(),
    same("intermediate_size", "ffn_size"),
    both_biases(default=False),
    same("mlp_bias", "ffn_bias", default=False),
)
_LLAMA = (
    width_of_heads("llama"),
    head_dim(),
    rotary(),
    # Splits matmuls as tensor-parallel training did, to get the same rounding.
    only("pretraining_tp", 1),
)

LLAMA = Family(model_type="llama", architecture="LlamaForCausalLM", rules=llama_like() + _SHARED + _LLAMA)


def _mistral(rope: ConfigRule, *, window: int | None) -> tuple[ConfigRule, ...]:
    """Return the rules shared by Mistral and Ministral 3."""
    return llama_like(
        DENSE,
        constant(qkv_bias=False),
        kv_heads(),
        head_dim(),
        rope,
        one_window(default=window),
        same("intermediate_size", "ffn_size"),
    )


MISTRAL = Family(model_type="mistral", architecture="MistralForCausalLM", rules=_mistral(rotary(), window=4096))

_MINISTRAL_ROPE = {
    "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384, "beta_fast": 32.0,
    "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
}  # fmt: skip

MINISTRAL3 = Family(
    model_type="ministral3",
    architecture="Ministral3ForCausalLM",
    rules=_mistral(
        rotary(
            theta=1e6,
            default=_MINISTRAL_ROPE,
            growth_key="llama_4_scaling_beta",
            # The maximum length, repeated.
            ignored=frozenset({"max_position_embeddings"}),
        ),
        window=None,
    ),
)

# No positions in every fourth layer, or in listed layers.
_SMOLLM3 = (
    divided_head_dim(),
    rotary(theta=2_000_000.0),
    rotary_layers(),
    only("use_sliding_window", False, written=False),
    only("sliding_window", None, written=False),
)

SMOLLM3 = Family(
    model_type="smollm3", architecture="SmolLM3ForCausalLM", rules=llama_like(tied=True) + _SHARED + _SMOLLM3
)


def _divided(key: str, name: str) -> ConfigRule:
    """Return the rule for a key that is the inverse of our factor."""

    def read(hf: HfConfig) -> dict[str, Any]:
        value = typed(key, first_of(hf, (key,), 1.0), "float")
        if value <= 0:
            raise ConfigError(f"{key}={value} in config.json must be above 0.")
        return {name: 1 / value}

    return ConfigRule(keys=(key,), read=read, write=lambda config: {key: 1 / getattr(config, name)})


def _score_factor() -> ConfigRule:
    """Return the rule for the score scale."""
    key = "attention_multiplier"

    def write(config: ModelFields) -> dict[str, Any]:
        return {key: config.attention_scale or config.head_dim**-0.5}

    return ConfigRule(
        keys=(key,), read=lambda hf: {"attention_scale": typed(key, first_of(hf, (key,), 1.0), "float")}, write=write
    )


# Factors on embeddings, sublayer outputs, scores and logits (muP).
GRANITE_FACTORS = (
    divided_head_dim(),
    same("embedding_multiplier", "embedding_scale", default=1.0),
    same("residual_multiplier", "residual_scale", default=1.0),
    _score_factor(),
    _divided("logits_scaling", "logit_scale"),
)

GRANITE = Family(
    model_type="granite",
    architecture="GraniteForCausalLM",
    rules=llama_like() + _SHARED + (rotary(),) + GRANITE_FACTORS,
)
