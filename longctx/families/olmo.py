"""OLMo 2 and 3: a norm on the output of each part and none before it; windows in three of four layers of OLMo 3."""

from __future__ import annotations

from longctx.families.layers import every_nth_full, full_attention, windows
from longctx.families.llama import DENSE
from longctx.families.rotary import global_and_local_rotary, rotary
from longctx.families.rules import both_biases, constant, divided_head_dim, kv_heads, llama_like, same
from longctx.families.spec import Family

# The norms keep their names from transformers' Llama, and stand behind what they stood before there.
_OLMO = (
    *llama_like(eps=1e-5),
    DENSE,
    constant(qk_norm="full", norm_order="output"),
    kv_heads(default_is_heads=True),
    divided_head_dim(),
    both_biases(default=False),
    same("intermediate_size", "ffn_size"),
)

_FULL = (rotary(), full_attention())
_WINDOWS = (
    global_and_local_rotary(theta=500_000.0, local_theta=500_000.0, kinds=every_nth_full),
    windows(4096, every_nth_full),
)

OLMO2 = Family(model_type="olmo2", architecture="Olmo2ForCausalLM", rules=_OLMO + _FULL)

OLMO3 = Family(model_type="olmo3", architecture="Olmo3ForCausalLM", rules=_OLMO + _WINDOWS)
