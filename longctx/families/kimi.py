"""Kimi Linear: Kimi Delta Attention layers, with softmax attention in every fourth layer, and DeepSeek's experts."""

from __future__ import annotations

from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    both_biases,
    constant,
    integer,
    kv_heads,
    layer_count,
    llama_like,
    only,
    optional,
    same,
)
from longctx.families.deepseek import MTP, VALUE_SIZE, shared_experts
from longctx.families.layer_rules import FULL, LINEAR, first_dense, shortest
from longctx.families.spec import (
    BLOCK,
    ConfigRule,
    Family,
    HfConfig,
    StorageLayout,
    TensorRule,
    block_tensor,
    per_expert,
)
from longctx.untrusted.strict_json import shown

_EXPERT = "block_sparse_moe.experts.{expert}."
_DELTA = "linear_attn_config"
_SIZES = {
    "linear_num_heads": "num_heads",
    "linear_head_dim": "head_dim",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}
"""transformers' size keys, and the makers' keys in a table of their own."""


def _delta_layers() -> ConfigRule:
    """Return the rule for Kimi Delta Attention layers and their sizes.

    Sizes come from the original table, or from transformers' keys for entries that it lacks.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        count, table = layer_count(hf), hf.get(_DELTA) or {}
        if not isinstance(table, dict):
            raise ConfigError(f"{_DELTA}={shown(table)} in config.json must be a table.")
        # transformers writes layer_types; the makers' files list layers in a table.
        kinds = hf.get("layer_types") or _by_table(table, count)
        if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (FULL, LINEAR) for kind in kinds):
            raise ConfigError(
                f"layer_types={shown(kinds)} is not supported by this decoder; supported: a list of {count}, one per "
                f"layer, each {FULL} or {LINEAR}."
            )
        found: dict[str, Any] = {"layers": tuple({FULL: "full", LINEAR: "kda"}[kind] for kind in shortest(kinds))}
        # A model without such layers needs no sizes.
        if LINEAR in kinds:
            heads, width, conv = (
                integer(table, makers_key) if makers_key in table else integer(hf, ours, default)
                for (ours, makers_key), default in zip(_SIZES.items(), (32, 128, 4), strict=True)
            )
            found |= {"delta_key_heads": heads, "delta_key_dim": width, "delta_conv": conv}
        return found

    def write(config: ModelFields) -> dict[str, Any]:
        names = [{"kda": LINEAR}.get(config.layer_kind(n), FULL) for n in range(config.num_layers)]
        sizes = config.delta_sizes
        values = (sizes.key_heads, sizes.key_dim, sizes.conv)
        return {"layer_types": names} | dict(zip(_SIZES, values, strict=True))

    return ConfigRule(keys=("layer_types", _DELTA, *_SIZES), read=read, write=write)


def _by_table(table: dict[str, Any], count: int) -> list[str]:
    """Return the layer kinds, numbered from 1 in the original table; without a table every fourth is full."""
    # transformers' own pattern: layer 0 is linear too.
    if "full_attn_layers" not in table and "kda_layers" not in table:
        return [FULL if n and n % 4 == 0 else LINEAR for n in range(count)]
    # A layer in neither list keeps an empty kind, which the caller rejects.
    kinds = [""] * count
    for key, kind in (("full_attn_layers", FULL), ("kda_layers", LINEAR)):
        numbers = table.get(key)
        if not isinstance(numbers, list) or any(type(n) is not int or not 1 <= n <= count for n in numbers):
            raise ConfigError(
                f"{_DELTA}.{key}={shown(numbers)} in config.json must be a list of layers from 1 to {count}."
            )
        for number in numbers:
            kinds[number - 1] = kind
    return kinds


def _dense_layers() -> ConfigRule:
    """Return the rule for dense layers: by name, or the first ``first_k_dense_replace``."""
    by_number, key = first_dense(1), "mlp_layer_types"

    def read(hf: HfConfig) -> dict[str, Any]:
        # transformers 5 writes names; the original files have a number.
        names = hf.get(key)
        if names is None:
            return by_number.read(hf)
        count = layer_count(hf)
        if not isinstance(names, list) or len(names) != count or any(name not in ("dense", "sparse") for name in names):
            raise ConfigError(f"{key}={shown(names)} in config.json must be a list of {count}, each dense or sparse.")
        return {"dense_layers": tuple(n for n in range(count) if names[n] == "dense")}

    def write(config: ModelFields) -> dict[str, Any]:
        return {key: ["sparse" if config.has_experts(n) else "dense" for n in range(config.num_layers)]}

    return ConfigRule(keys=(key, *by_number.keys), read=read, write=write)


def _head_sizes() -> ConfigRule:
    """Return the rule for a head's own and shared channels; ``head_dim`` in released files is ignored."""
    own, shared = "qk_nope_head_dim", "qk_rope_head_dim"
    return ConfigRule(
        keys=(own, shared, "head_dim", "qk_head_dim"),
        read=lambda hf: {"head_dim": integer(hf, own) + integer(hf, shared), "rope_head_dim": integer(hf, shared)},
        write=lambda config: {own: config.head_dim - config.rope_head_dim, shared: config.rope_head_dim},
    )


def _of_layer(ours: str, *layouts: StorageLayout) -> TensorRule:
    """Return the rule for a parameter in each block."""
    return TensorRule(parameters=(BLOCK + ours,), layouts=layouts)


def _experts_side(ours: str, *, makers: str = "block_sparse_moe") -> TensorRule:
    """Return the rule for a parameter in ``mlp``, which is ``block_sparse_moe`` in layers with experts."""
    # transformers writes block_sparse_moe in all layers.
    other = {"mlp": "block_sparse_moe", "block_sparse_moe": "mlp"}[makers]
    return block_tensor(f"mlp.{ours}", f"{makers}.{ours}", f"{other}.{ours}")


def _decay_factor(name: str) -> TensorRule:
    """Return the rule for a low-rank factor of the decay projection, which is in a separate module in transformers."""
    return block_tensor(f"self_attn.{name}.weight", f"self_attn.{name}.weight", f"self_attn.forget_gate.{name}.weight")


def _shared_expert(part: str) -> TensorRule:
    """Return the rule for a shared-expert matrix."""
    makers, hf_name = (f"{folder}.shared_experts.{part}.weight" for folder in ("block_sparse_moe", "mlp"))
    return block_tensor(f"mlp.shared_expert.{part}.weight", makers, hf_name)


_PARTS = ("gate_proj", "up_proj", "down_proj")
# Llama's keys, except that the maximum length has another name.
_LLAMA = tuple(rule for rule in llama_like(eps=1e-5) if "max_position_embeddings" not in rule.keys)
_RULES = (
    same("model_max_length", "max_positions", also=("max_position_embeddings",)),
    # The softmax layers are latent attention without positions: the channels that DeepSeek rotates stay unrotated.
    constant(position="none", score_function="sigmoid", selection_bias=True),
    kv_heads(default_is_heads=True),
    _delta_layers(),
    _dense_layers(),
    _head_sizes(),
    VALUE_SIZE,
    same("kv_lora_rank", "kv_lora_rank", least=1),
    optional("q_lora_rank", "q_lora_rank", default=None),
    both_biases(default=False),
    shared_experts("num_shared_experts", "n_shared_experts", default=1),
    same("intermediate_size", "ffn_size"),
    same("moe_intermediate_size", "expert_ffn_size"),
    same("num_experts", "num_experts", also=("num_local_experts", "n_routed_experts"), least=1),
    same("num_experts_per_token", "experts_per_token", also=("num_experts_per_tok",)),
    same("num_expert_group", "expert_groups", also=("n_group",), default=1),
    same("topk_group", "groups_per_token", default=1),
    same("moe_renormalize", "normalize_gates", also=("norm_topk_prob",), default=True),
    same("routed_scaling_factor", "routed_scale", default=2.446),
    only("mla_use_nope", True, written=False),
    only("moe_router_activation_func", "sigmoid", written=False),
    only("moe_layer_freq", 1, written=False),
    only("rope_scaling", None, written=False),
    only(MTP.key, 0, written=False),
    only("pretraining_tp", 1, written=False),
)
_TENSORS = (
    _of_layer(
        # Three tensors in the original files, one in transformers' module.
        "self_attn.conv1d.weight",
        StorageLayout(names=tuple(f"{BLOCK}self_attn.{part}_conv1d.weight" for part in "qkv")),
        StorageLayout(names=(f"{BLOCK}self_attn.conv1d.weight",)),
    ),
    # Names in the original files, then in transformers' modules.
    _of_layer(
        "self_attn.A_log.weight",
        StorageLayout(names=(f"{BLOCK}self_attn.A_log",), steps=("per_head",)),
        StorageLayout(names=(f"{BLOCK}self_attn.forget_gate.A_log",), steps=("per_head",)),
    ),
    block_tensor("self_attn.dt_bias.weight", "self_attn.dt_bias", "self_attn.forget_gate.dt_bias"),
    _decay_factor("f_a_proj"),
    _decay_factor("f_b_proj"),
    _experts_side("gate.weight"),
    _experts_side("gate.e_score_correction_bias"),
)

KIMI_LINEAR = Family(
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    rules=_LLAMA + _RULES,
    tensors=_TENSORS
    + tuple(_shared_expert(part) for part in _PARTS)
    + tuple(_experts_side(f"{part}.weight", makers="mlp") for part in _PARTS)
    + per_expert(_EXPERT + "w1.weight", _EXPERT + "w3.weight", _EXPERT + "w2.weight"),
    # A switch for expert selection without groups, and the base of a rope that no layer has.
    ignored_keys=frozenset({"output_router_logits", "use_grouped_topk", "rope_theta"}),
)
