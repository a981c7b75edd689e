"""Gemma 2, and Gemma 3's text model."""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    GATED_ACTIVATIONS,
    SIZES,
    UNUSED,
    both_biases,
    constant,
    head_dim,
    integer,
    kv_heads,
    only,
    optional,
    same,
    translated,
    width_of_heads,
)
from longctx.families.layer_rules import every_nth_full, every_other, windows
from longctx.families.llama import DENSE
from longctx.families.rope_rules import global_and_local_rotary, rotary
from longctx.families.spec import ConfigRule, Family, HfConfig


def _query_scale() -> ConfigRule:
    """Return the rule for scores divided by the square root of ``query_pre_attn_scalar``."""
    key = "query_pre_attn_scalar"

    def read(hf: HfConfig) -> dict[str, Any]:
        divisor = integer(hf, key, 256)
        if divisor < 1:
            raise ConfigError(f"{key}={divisor} in config.json must be at least 1.")
        return {"attention_scale": divisor**-0.5}

    def write(config: ModelFields) -> dict[str, Any]:
        # An integer in transformers: any other scale reads back differently, so the loss is detected.
        return {key: round((config.attention_scale or config.head_dim**-0.5) ** -2)}

    return ConfigRule(keys=(key,), read=read, write=write)


def _gemma(family: str, *, attention_cap: float | None, logit_cap: float | None) -> tuple[ConfigRule, ...]:
    """Return the rules shared by Gemma 2 and 3."""
    return (
        *SIZES,
        *UNUSED,
        DENSE,
        width_of_heads(family),
        # Fixed for the family, without a key: norms multiply by 1 + weight, before and after each sublayer.
        constant(norm_offset=True, norm_order="sandwich"),
        kv_heads(),
        head_dim(256),
        _query_scale(),
        # Fixed as well: embeddings are multiplied by the square root of the width.
        ConfigRule(read=lambda hf: {"embedding_scale": integer(hf, "hidden_size") ** 0.5}),
        same("rms_norm_eps", "norm_eps", default=1e-6),
        same("tie_word_embeddings", "tie_embeddings", default=True),
        translated("hidden_activation", "activation", _ACTIVATIONS, default="gelu_pytorch_tanh"),
        same("intermediate_size", "ffn_size"),
        both_biases(default=False),
        optional("attn_logit_softcapping", "attention_softcap", default=attention_cap),
        optional("final_logit_softcapping", "logit_softcap", default=logit_cap),
        only("attention_dropout", 0.0, None),
        only("use_bidirectional_attention", False, None, written=False),
        # In old files; hidden_activation takes precedence.
        only("hidden_act", "gelu_pytorch_tanh", written=False),
    )


# The name in released files comes first, because the first name for a meaning is written.
_ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh"} | GATED_ACTIVATIONS

GEMMA2 = Family(
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    rules=(
        *_gemma("gemma2", attention_cap=50.0, logit_cap=30.0),
        rotary(),
        windows(4096, every_other),
    ),
)

GEMMA3_TEXT = Family(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    rules=(
        *_gemma("gemma3_text", attention_cap=None, logit_cap=None),
        constant(qk_norm="head"),
        global_and_local_rotary(theta=1_000_000.0, local_theta=10_000.0, kinds=every_nth_full),
        windows(4096, every_nth_full, pattern_key="sliding_window_pattern"),
    ),
)
