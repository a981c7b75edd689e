"""OLMo 2 and 3: a norm on each sublayer's output instead of its input; windows in three of four OLMo 3 layers.

OLMo Hybrid has gated delta layers instead of the windows, with norms before their sublayers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.families.config_rules import both_biases, constant, divided_head_dim, integer, kv_heads, llama_like, same
from longctx.families.layer_rules import delta_layers, every_nth_full, full_attention, windows
from longctx.families.llama import DENSE
from longctx.families.rope_rules import global_and_local_rotary, rotary
from longctx.families.spec import BLOCK, ConfigRule, Family, HfConfig, StorageLayout, TensorRule, block_tensor

# The norms keep their names from transformers' Llama, but come after the sublayer instead of before it.
_OLMO = llama_like(
    DENSE,
    constant(qk_norm="full", norm_order="output"),
    kv_heads(default_is_heads=True),
    divided_head_dim(),
    both_biases(default=False),
    same("intermediate_size", "ffn_size"),
    eps=1e-5,
)

_FULL = (rotary(), full_attention())
_WINDOWS = (
    global_and_local_rotary(theta=500_000.0, local_theta=500_000.0, kinds=every_nth_full),
    windows(4096, every_nth_full),
)

OLMO2 = Family(model_type="olmo2", architecture="Olmo2ForCausalLM", rules=_OLMO + _FULL)


def _hybrid_sizes() -> ConfigRule:
    """Return the rule for gated delta layer sizes, which are derived from the model's if absent."""
    named = delta_layers("gated_delta")

    def read(hf: HfConfig) -> dict[str, Any]:
        # Null means the same as an absent key.
        given = {key: value for key, value in hf.items() if value is not None}
        heads = integer(hf, "num_attention_heads")
        # transformers' defaults: as many heads as attention, keys 3/4 as wide as its heads, values twice as wide as
        # keys.
        sizes = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, **given}
        width = integer(hf, "hidden_size") * 3 // (4 * max(1, integer(sizes, "linear_num_key_heads")))
        sizes = {"linear_key_head_dim": width, **sizes}
        return named.read({"linear_value_head_dim": 2 * integer(sizes, "linear_key_head_dim"), **sizes})

    return ConfigRule(keys=named.keys, read=read, write=named.write)


def _positions() -> ConfigRule:
    """Return the rule for rotary positions, or for no positions without a base."""
    rope = rotary()

    def read(hf: HfConfig) -> dict[str, Any]:
        if hf.get("rope_theta") is None and not (hf.get("rope_parameters") or {}).get("rope_theta"):
            return {"position": "none"}
        return rope.read(hf)

    def write(config: ModelFields) -> dict[str, Any]:
        if config.position == "none":
            return {"rope_parameters": None}
        return rope.write(config)

    return ConfigRule(keys=rope.keys, read=read, write=write)


def _widths(config: ModelFields) -> Sequence[int]:
    """Return the query, key and value channels in a gated delta layer."""
    K, H, D, V, _ = config.delta_sizes
    return K * D, K * D, H * V


def _thirds(config: ModelFields) -> Sequence[int]:
    """Return the same channels in nearly equal parts, as transformers cuts its own single tensor."""
    part = -(-config.delta_sizes.channels // 3)
    return part, part, config.delta_sizes.channels - 2 * part


def _is_delta(config: ModelFields, layer: int) -> bool:
    return config.layer_kind(layer) == "gated_delta"


def _of_delta(ours: str, hf_name: str = "") -> TensorRule:
    """Return the rule for a gated delta layer's parameter, by default with the same name on disk."""
    return block_tensor(f"self_attn.{ours}", f"linear_attn.{hf_name or ours}")


_CONV = tuple(f"{BLOCK}linear_attn.{part}_conv1d.weight" for part in "qkv")
_DELTA = (
    TensorRule(
        parameters=(f"{BLOCK}self_attn.conv1d.weight",),
        layouts=(
            StorageLayout(names=_CONV, widths=_widths),
            StorageLayout(names=_CONV, widths=_thirds),
            # One tensor, as in transformers' module.
            StorageLayout(names=(f"{BLOCK}linear_attn.conv1d.weight",)),
        ),
    ),
    TensorRule(
        parameters=(f"{BLOCK}self_attn.in_proj_qkv.weight",),
        layouts=(
            StorageLayout(names=tuple(f"{BLOCK}linear_attn.{part}_proj.weight" for part in "qkv"), widths=_widths),
        ),
    ),
    _of_delta("in_proj_z.weight", "g_proj.weight"),
    _of_delta("in_proj_a.weight", "a_proj.weight"),
    _of_delta("in_proj_b.weight", "b_proj.weight"),
    _of_delta("A_log.weight", "A_log"),
    _of_delta("dt_bias.weight", "dt_bias"),
    _of_delta("norm.weight", "o_norm.weight"),
    _of_delta("out_proj.weight", "o_proj.weight"),
    block_tensor("input_layernorm.weight", "attention_layer_norm.weight", "input_layernorm.weight"),
    # transformers writes the second name in all layers.
    block_tensor("post_attention_layernorm.weight", "post_attention_layernorm.weight", "feedforward_layer_norm.weight"),
    block_tensor(
        "post_attention_layernorm.weight",
        "feedforward_layer_norm.weight",
        "post_attention_layernorm.weight",
        layer_condition=_is_delta,
    ),
)

OLMO3 = Family(model_type="olmo3", architecture="Olmo3ForCausalLM", rules=_OLMO + _WINDOWS)

_HYBRID = (
    DENSE,
    # The norm inside gated delta layers has its own epsilon.
    constant(qk_norm="full", norm_order="hybrid", delta_norm_eps=1e-5),
    kv_heads(default_is_heads=True),
    divided_head_dim(),
    both_biases(default=False),
    same("intermediate_size", "ffn_size"),
    same("linear_allow_neg_eigval", "delta_negative", default=True),
    _hybrid_sizes(),
    _positions(),
)

OLMO_HYBRID = Family(
    model_type="olmo_hybrid",
    architecture="OlmoHybridForCausalLM",
    rules=llama_like() + _HYBRID,
    tensors=_DELTA,
    # Weight initialisation.
    ignored_keys=frozenset(
        f"linear_{name}" for name in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor")
    ),
)
