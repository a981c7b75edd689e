"""Llama (2, 3, 3.1) and Mistral."""

from __future__ import annotations

from longctx.families.layers import full_attention, one_window
from longctx.families.rotary import rotary
from longctx.families.rules import both_biases, constant, head_dim, kv_heads, llama_like, only, same, width_of_heads
from longctx.families.spec import Family

# No key of a dense family says so.
DENSE = constant(num_experts=0)

LLAMA = Family(
    model_type="llama",
    architecture="LlamaForCausalLM",
    rules=(
        *llama_like(),
        DENSE,
        width_of_heads("llama"),
        kv_heads(default_is_heads=True),
        head_dim(),
        rotary(),
        full_attention(),
        same("intermediate_size", "ffn_size"),
        both_biases(default=False),
        same("mlp_bias", "ffn_bias", default=False),
        # Splits products as tensor-parallel training did, to round as it did.
        only("pretraining_tp", 1),
    ),
)

MISTRAL = Family(
    model_type="mistral",
    architecture="MistralForCausalLM",
    rules=(
        *llama_like(),
        DENSE,
        constant(qkv_bias=False),
        kv_heads(),
        head_dim(),
        rotary(),
        one_window(default=4096),
        same("intermediate_size", "ffn_size"),
    ),
)
