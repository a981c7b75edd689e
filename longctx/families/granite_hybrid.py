"""Granite 4 hybrid: Mamba-2 layers and some softmax attention, mostly without positions; shared experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.config_rules import both_biases, integer, kv_heads, layer_count, llama_like, only, same
from longctx.families.layer_rules import FULL, LINEAR, shortest
from longctx.families.llama import GRANITE_FACTORS
from longctx.families.rope_rules import rotary
from longctx.families.spec import BLOCK, ConfigRule, Family, HfConfig, StorageLayout, TensorRule, block_tensor, tensor
from longctx.untrusted.strict_json import shown

_MAKERS = {"mamba": LINEAR, "attention": FULL}
"""The makers' names for layer kinds."""
_SIZES = {
    "mamba_n_groups": ("delta_key_heads", 1),
    "mamba_n_heads": ("delta_value_heads", 128),
    "mamba_d_state": ("delta_key_dim", 256),
    "mamba_d_conv": ("delta_conv", 4),
}


def _layers() -> ConfigRule:
    """Return the rule for the Mamba-2 layers and their sizes."""
    kinds_keys = ("layer_types", "layers_block_type")
    head, expand = "mamba_d_head", "mamba_expand"

    def read(hf: HfConfig) -> dict[str, Any]:
        count = layer_count(hf)
        given = next((hf[key] for key in kinds_keys if hf.get(key) is not None), [LINEAR] * count)
        kinds = [_MAKERS.get(kind, kind) if isinstance(kind, str) else kind for kind in given or ()]
        if len(kinds) != count or any(kind not in (FULL, LINEAR) for kind in kinds):
            raise ConfigError(
                f"layer_types={shown(given)} is not supported by this decoder; supported: a list of {count}, one per "
                f"layer, each {FULL} or {LINEAR}."
            )
        found: dict[str, Any] = {"layers": tuple({FULL: "full", LINEAR: "mamba2"}[kind] for kind in shortest(kinds))}
        if LINEAR not in kinds:
            return found
        found |= {ours: integer(hf, key, default) for key, (ours, default) in _SIZES.items()}
        heads, values = found["delta_value_heads"], integer(hf, expand, 2) * integer(hf, "hidden_size")
        # transformers also divides if the key is missing.
        if hf.get(head, "auto") == "auto":
            hf = {**hf, head: values // max(1, heads)}
        found["delta_value_dim"] = integer(hf, head)
        if heads * found["delta_value_dim"] != values:
            raise ConfigError(
                f"config.json has {heads} heads of {found['delta_value_dim']} (mamba_n_heads, {head}) for {values} "
                f"channels ({expand}·hidden_size)."
            )
        return found

    def write(config: ModelFields) -> dict[str, Any]:
        names = [LINEAR if config.layer_kind(n) == "mamba2" else FULL for n in range(config.num_layers)]
        K, H, D, V, conv = config.delta_sizes
        written: dict[str, Any] = dict(zip(_SIZES, (K, H, D, conv), strict=True))
        return {"layer_types": names, **written, head: V, expand: H * V // config.hidden_size}

    return ConfigRule(keys=(*kinds_keys, *_SIZES, head, expand), read=read, write=write)


def _positions() -> ConfigRule:
    """Return the rule for rotary positions, or for no positions if the config does not request them."""
    rope, key = rotary(), "position_embedding_type"

    def read(hf: HfConfig) -> dict[str, Any]:
        if hf.get(key) == "rope":
            return rope.read(hf)
        if hf.get(key) not in (None, "nope"):
            raise ConfigError(f"{key}={shown(hf[key])} in config.json is not supported; supported: 'rope', 'nope'.")
        return {"position": "none"}

    def write(config: ModelFields) -> dict[str, Any]:
        if config.position == "none":
            return {key: "nope"}
        return {key: "rope", **rope.write(config)}

    return ConfigRule(keys=(key, *rope.keys), read=read, write=write)


def _ffn() -> ConfigRule:
    """Return the rule for routed experts with a shared one; without routed ones, the shared one is the FFN."""
    keys = ("num_local_experts", "num_experts_per_tok", "intermediate_size", "shared_intermediate_size")

    def read(hf: HfConfig) -> dict[str, Any]:
        routed, shared = integer(hf, keys[0], 8), integer(hf, keys[3], 1024)
        # The series' dense models have only a shared expert, in place of an FFN.
        if not routed:
            return {"num_experts": 0, "ffn_size": shared}
        return {
            "num_experts": routed,
            "experts_per_token": integer(hf, keys[1], 2),
            "expert_ffn_size": integer(hf, keys[2], 11008),
            "shared_ffn_size": shared,
            "shared_gate": False,
            "normalize_gates": True,
        }

    def write(config: ModelFields) -> dict[str, Any]:
        if not config.num_experts:
            return dict(zip(keys, (0, 0, config.ffn_size, config.ffn_size), strict=True))
        sizes = config.num_experts, config.experts_per_token, config.expert_ffn_size, config.shared_ffn_size
        return dict(zip(keys, sizes, strict=True))

    return ConfigRule(keys=keys, read=read, write=write)


def _step_limit() -> ConfigRule:
    """Return the rule for limits on dt, which are not supported."""
    key = "time_step_limit"

    def read(hf: HfConfig) -> dict[str, Any]:
        given = hf.get(key)
        # JSON has no infinity: transformers writes the second form.
        no_limits = ([0.0, math.inf], [0.0, {"__float__": "Infinity"}])
        if given is not None and given not in no_limits:
            raise ConfigError(f"{key}={shown(given)} in config.json is not supported; supported: no limit.")
        return {}

    return ConfigRule(keys=(key,), read=read)


def _projection_rows(config: ModelFields) -> Sequence[int]:
    """Return the disk row for each of our projection rows."""
    K, H, D, V, _ = config.delta_sizes
    values = H * V
    # On disk: gates, values, keys, queries, steps. Here: gates, queries, keys, values, steps.
    steps = 2 * values + 2 * K * D
    rows = list(range(values))
    rows += [values + row for row in _channel_rows(config)]
    rows += range(steps, steps + H)
    return rows


def _channel_rows(config: ModelFields) -> Sequence[int]:
    """Return the disk rows of queries, keys and values; the order on disk is values, keys, queries."""
    K, H, D, V, _ = config.delta_sizes
    values, keys = H * V, K * D
    rows = list(range(values + keys, values + 2 * keys))
    rows += range(values, values + keys)
    rows += range(values)
    return rows


def _of_mamba(name: str, *members: str, rows: Any = None) -> TensorRule:
    """Return the rule for a Mamba-2 layer's parameters that are one tensor on disk."""
    return TensorRule(
        parameters=tuple(f"{BLOCK}self_attn.{member}.weight" for member in members),
        layouts=(StorageLayout(names=(f"{BLOCK}mamba.{name}",), rows=rows),),
    )


def _has_routed(config: ModelFields) -> bool:
    return config.num_experts > 0


def _is_dense(config: ModelFields) -> bool:
    return not config.num_experts


def _of_shared(place: str, condition: Any) -> tuple[TensorRule, ...]:
    """Return the rules for the FFN that all tokens use; its gate and up projections are one tensor on disk."""
    both = tuple(f"{BLOCK}{place}.{part}_proj.weight" for part in ("gate", "up"))
    joined = StorageLayout(names=(f"{BLOCK}shared_mlp.input_linear.weight",))
    return (
        TensorRule(parameters=both, layouts=(joined,), condition=condition),
        tensor(f"{BLOCK}{place}.down_proj.weight", f"{BLOCK}shared_mlp.output_linear.weight", condition=condition),
    )


GRANITE_HYBRID = Family(
    model_type="granitemoehybrid",
    architecture="GraniteMoeHybridForCausalLM",
    rules=llama_like(
        *GRANITE_FACTORS,
        kv_heads(default_is_heads=True),
        both_biases(default=False),
        _layers(),
        _positions(),
        _ffn(),
        _step_limit(),
        same("router_aux_loss_coef", "balance_loss_weight", default=0.001),
        only("mamba_conv_bias", True),
        only("mamba_proj_bias", False),
        only("normalization_function", "rmsnorm", written=False),
    ),
    tensors=(
        _of_mamba("in_proj.weight", "in_proj_z", "in_proj_qkv", "in_proj_dt", rows=_projection_rows),
        _of_mamba("conv1d.weight", "conv1d", rows=_channel_rows),
        _of_mamba("conv1d.bias", "conv_bias", rows=_channel_rows),
        _of_mamba("A_log", "A_log"),
        _of_mamba("dt_bias", "dt_bias"),
        _of_mamba("D", "skip"),
        _of_mamba("norm.weight", "norm"),
        _of_mamba("out_proj.weight", "out_proj"),
        *_of_shared("mlp", _is_dense),
        *_of_shared("mlp.shared_expert", _has_routed),
        block_tensor("mlp.gate.weight", "block_sparse_moe.router.layer.weight", "block_sparse_moe.router.weight"),
        block_tensor(
            "mlp.experts.gate_up_proj",
            "block_sparse_moe.input_linear.weight",
            "block_sparse_moe.experts.gate_up_proj",
        ),
        block_tensor(
            "mlp.experts.down_proj", "block_sparse_moe.output_linear.weight", "block_sparse_moe.experts.down_proj"
        ),
    ),
    # Chunked computation, and weight initialisation.
    ignored_keys=frozenset({"mamba_chunk_size", "init_method", "output_router_logits"}),
)
