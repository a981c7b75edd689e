"""Gemma 4 text models without experts: global layers have their own heads, with keys as values.

Values are normed too, and the slowest pairs in the global layers' heads have no position.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.architecture.rope import Rope
from longctx.errors import ConfigError
from longctx.families.config_rules import (
    GATED_ACTIVATIONS,
    ONE_STACK,
    SIZES,
    both_biases,
    constant,
    head_dim,
    integer,
    kv_heads,
    layer_count,
    only,
    optional,
    same,
    translated,
    typed,
)
from longctx.families.layer_rules import FULL, WINDOW, windows
from longctx.families.llama import DENSE
from longctx.families.spec import ConfigRule, Family, HfConfig
from longctx.untrusted.strict_json import shown

# Defaults in transformers' class.
_PATTERN = 6
_WINDOW = 512
_HEADS = ("head_dim", "num_key_value_heads")
_DEFAULT_ROPE_TABLES: dict[str, dict[str, Any]] = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    WINDOW: {"rope_type": "default", "rope_theta": 1e4},
}
"""Defaults for a config.json without rope tables."""


def _kinds(hf: HfConfig, count: int) -> list[str]:
    return [WINDOW if (layer + 1) % _PATTERN else FULL for layer in range(count)]


def _kinds_of(hf: HfConfig) -> Any:
    """Return the layer kinds; the last one is always global."""
    kinds = hf.get("layer_types") or _kinds(hf, layer_count(hf))
    return [*kinds[:-1], FULL] if isinstance(kinds, list) and kinds else kinds


def _layers() -> ConfigRule:
    """Return the rule for window layers and global layers."""
    window_rule = windows(_WINDOW, _kinds)

    def read(hf: HfConfig) -> dict[str, Any]:
        found = window_rule.read({**hf, "layer_types": _kinds_of(hf)})
        return found | {"layers": tuple({"full": "global"}.get(kind, kind) for kind in found["layers"])}

    def write(config: ModelFields) -> dict[str, Any]:
        names = [WINDOW if config.layer_kind(layer) == "window" else FULL for layer in range(config.num_layers)]
        return {"sliding_window": config.window or _WINDOW, "layer_types": names}

    return ConfigRule(keys=window_rule.keys, read=read, write=write)


def _global_heads() -> ConfigRule:
    """Return the rule for global layers' heads, by original keys or by transformers' table with all layers."""
    size, count, shares, table = "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v", "per_layer_config"

    def read(hf: HfConfig) -> dict[str, Any]:
        shared = typed(shares, hf.get(shares, False), "bool")
        heads: Mapping[str, Any] = {"head_dim": integer(hf, size, 512)}
        # transformers reads their number only if values are keys.
        if shared and hf.get(count) is not None:
            heads = {**heads, "num_key_value_heads": integer(hf, count)}
        if table in hf:
            heads = _common_entry(hf[table] or {}, [layer for layer, kind in enumerate(_kinds_of(hf)) if kind == FULL])
            if "num_key_value_heads" in heads and not shared:
                raise ConfigError(
                    f"{table}={shown(hf[table])} in config.json has its own key heads, which requires {shares}=true."
                )
        found = [integer(heads, key, 0) for key in _HEADS]
        return dict(zip(("global_head_dim", "global_kv_heads"), found, strict=True)) | {"global_shared_values": shared}

    def write(config: ModelFields) -> dict[str, Any]:
        return {
            size: config.global_head_dim or config.head_dim,
            count: config.global_kv_heads or config.num_kv_heads,
            shares: config.global_shared_values,
        }

    return ConfigRule(keys=(size, count, shares, table), read=read, write=write)


def _common_entry(table: Any, layers: Sequence[int]) -> Mapping[str, Any]:
    """Return the table's common entry for these layers; raise ConfigError for different or unsupported entries.

    An empty table gives an empty entry.
    """
    # The decoder has one spec per layer kind, so layers that differ are rejected.
    entries = list(table.values()) if isinstance(table, dict) else [table]
    fits = all(isinstance(entry, dict) and set(entry) <= set(_HEADS) for entry in entries)
    if entries and fits:
        # transformers pads the layer numbers with zeros, so that they sort.
        width = len(str(max(layers, default=0)))
        numbers = {str(key).zfill(width) for key in table}
        fits = numbers == {str(layer).zfill(width) for layer in layers}
        fits = fits and all(entry == entries[0] for entry in entries)
    if not fits:
        raise ConfigError(
            f"per_layer_config={shown(table)} in config.json is not supported; supported: a table with the same "
            f"{' and '.join(_HEADS)} for each full layer."
        )
    return entries[0] if entries else {}


def _rotary() -> ConfigRule:
    """Return the rule for one table with a rope for global layers and a base for windows."""
    key = "rope_parameters"

    def read(hf: HfConfig) -> dict[str, Any]:
        tables = hf.get(key) or _DEFAULT_ROPE_TABLES
        if not isinstance(tables, dict) or not set(tables) <= {FULL, WINDOW}:
            raise ConfigError(f"{key}={shown(tables)} in config.json must have the tables {FULL} and {WINDOW}.")
        found: dict[str, dict[str, Any]] = {}
        for name, default_table in _DEFAULT_ROPE_TABLES.items():
            # If absent, the class's own table, as in transformers.
            table = tables.get(name) or default_table
            kinds = {"default", default_table["rope_type"]}
            known = {"rope_type", "rope_theta", "partial_rotary_factor", "factor"}
            fits = isinstance(table, dict) and {"rope_type", "rope_theta"} <= set(table) <= known
            if not fits or table["rope_type"] not in sorted(kinds):
                raise ConfigError(
                    f"{key}.{name}={shown(table)} in config.json is not supported; supported: {sorted(kinds)} with "
                    f"{', '.join(sorted(known))}."
                )
            numbers = {k: typed(f"{key}.{name}.{k}", v, "float") for k, v in table.items() if k != "rope_type"}
            found[name] = {"rope_type": table["rope_type"], **numbers}
            if table["rope_type"] == "default" and set(table) > {"rope_type", "rope_theta"}:
                raise ConfigError(
                    f"{key}.{name}={shown(table)} in config.json has keys that a default rope does not read."
                )
        of_global, of_window = found[FULL], found[WINDOW]
        rope = Rope(theta=of_global["rope_theta"])
        partial, factor = of_global.get("partial_rotary_factor", 1.0), of_global.get("factor", 1.0)
        if of_global["rope_type"] == "proportional":
            rope = Rope(theta=rope.theta, kind="proportional", partial=partial, factor=factor)
        local = of_window["rope_theta"]
        # Without windows their base is not read, and a field that is not read is rejected.
        if WINDOW not in _kinds_of(hf):
            local = 0.0
        return {"rope": rope, "local_rope_theta": local}

    def write(config: ModelFields) -> dict[str, Any]:
        rope = config.rope
        of_global: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
        if rope.kind == "proportional":
            of_global["partial_rotary_factor"] = rope.partial
            if rope.factor != 1:
                of_global["factor"] = rope.factor
        local = config.local_rope_theta or rope.theta
        return {key: {FULL: of_global, WINDOW: {"rope_type": "default", "rope_theta": local}}}

    return ConfigRule(keys=(key,), read=read, write=write)


# The name in released files comes first, because the first name for a meaning is written.
_ACTIVATIONS = {"gelu_pytorch_tanh": "geglu_tanh"} | GATED_ACTIVATIONS
_RULES = (
    ONE_STACK,
    DENSE,
    # Norms multiply by their weight, unlike in Gemma 2 and 3. An untrained factor scales each layer's output.
    constant(norm_order="sandwich", qk_norm="head", v_norm=True, layer_scalars=True, attention_scale=1.0),
    kv_heads(),
    head_dim(256),
    _global_heads(),
    _layers(),
    _rotary(),
    # Fixed in all Gemma models: embeddings are multiplied by the square root of the width.
    ConfigRule(read=lambda hf: {"embedding_scale": integer(hf, "hidden_size") ** 0.5}),
    same("rms_norm_eps", "norm_eps", default=1e-6),
    same("tie_word_embeddings", "tie_embeddings", default=True),
    translated("hidden_activation", "activation", _ACTIVATIONS, default="gelu_pytorch_tanh"),
    same("intermediate_size", "ffn_size"),
    both_biases(default=False),
    optional("final_logit_softcapping", "logit_softcap", default=None),
    only("attention_dropout", 0.0, None),
    # For images: which image tokens see each other.
    only("use_bidirectional_attention", None, False, "vision", written=False),
    # These would add unsupported parts to a layer: experts in addition to the FFN, embeddings per layer, other layers'
    # keys.
    only("enable_moe_block", False, written=False),
    only("hidden_size_per_layer_input", 0, default=256),
    only("num_kv_shared_layers", 0, written=False),
)

GEMMA4_TEXT = Family(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    rules=SIZES + _RULES,
    # Sizes of parts that no layer has.
    ignored_keys=frozenset(
        {"vocab_size_per_layer_input", "use_double_wide_mlp", "num_experts", "top_k_experts", "moe_intermediate_size"}
        | {"expert_intermediate_size"}
    ),
    passthrough_keys=("use_bidirectional_attention",),
)
