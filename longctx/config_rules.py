"""What must hold between the fields of a ``ModelConfig``. Each message names the value, the rule, the nearest fit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from longctx.errors import ConfigError

if TYPE_CHECKING:
    from longctx.config import ModelConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "norm": ("rmsnorm", "layernorm"),
    "norm_order": ("pre", "post", "sandwich"),
    "activation": ("swiglu", "geglu", "geglu_tanh", "swiglu_oai", "gelu", "gelu_tanh", "relu", "relu2"),
    "qk_norm": ("none", "head", "full"),
    "position": ("rope", "none", "learned", "sinusoidal", "alibi", "t5", "relative"),
    "score_function": ("softmax", "sigmoid"),
}
"""The words that a field may hold."""

LAYER_KINDS = ("full", "window", "sparse", "linear")
"""What an attention layer sees of its document."""

GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_oai")
"""Activations that multiply two projections."""

_AT_LEAST_ONE = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim", "max_positions"),
    *("expert_groups", "groups_per_token", "relative_buckets", "relative_max_distance"),
)
_POSITIVE = ("norm_eps", "init_std", "embedding_scale", "residual_scale", "logit_scale", "routed_scale")
_NOT_NEGATIVE = (
    *("num_experts", "shared_ffn_size", "balance_loss_weight", "attention_scale", "attention_softcap"),
    *("logit_softcap", "window", "sparse_stride", "q_lora_rank", "kv_lora_rank", "rope_head_dim", "value_head_dim"),
    "local_rope_theta",
)


def check_model(config: ModelConfig) -> None:
    """ConfigError for the first rule that does not hold."""
    _check_numbers(config)
    for name, words in CHOICES.items():
        if getattr(config, name) not in words:
            raise ConfigError(f"model.{name}={getattr(config, name)!r} is unknown. Try one of {list(words)}.")
    _check_heads(config)
    _check_layers(config)
    _check_latent(config)
    _check_positions(config)
    _check_ffn(config)
    if config.num_experts:
        _check_experts(config)


def _check_numbers(config: ModelConfig) -> None:
    for name in _AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise ConfigError(f"model.{name}={getattr(config, name)} must be at least 1.")
    for name in _POSITIVE:
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"model.{name}={getattr(config, name)} must be a positive number.")
    for name in _NOT_NEGATIVE:
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"model.{name}={getattr(config, name)} must not be negative; 0 means none.")
    if not 0 <= config.residual_dropout < 1:
        raise ConfigError(f"model.residual_dropout={config.residual_dropout} must lie at 0 or above, and below 1.")


def _check_heads(config: ModelConfig) -> None:
    if config.num_heads % config.num_kv_heads:
        divisors = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise ConfigError(
            f"model.num_kv_heads={config.num_kv_heads} does not divide model.num_heads={config.num_heads}.\n"
            f"Try one of {divisors}."
        )


def _check_layers(config: ModelConfig) -> None:
    if not config.layers or not set(config.layers) <= set(LAYER_KINDS):
        raise ConfigError(f"model.layers={list(config.layers)} must name one or more of {list(LAYER_KINDS)}.")
    for name in ("layers", "rope_layers"):
        count = len(getattr(config, name))
        if not 1 <= count <= config.num_layers:
            raise ConfigError(
                f"model.{name} names {count} layers; model.num_layers={config.num_layers} has room for 1 "
                f"to {config.num_layers}, repeated over the depth."
            )
    needs_window = {"window", "sparse"} & set(config.layers)
    if bool(needs_window) != (config.window > 0):
        raise ConfigError(
            f"model.window={config.window} with model.layers={list(config.layers)}: window and sparse layers need a "
            "window of at least 1, and nothing else reads it."
        )
    if ("sparse" in config.layers) != (config.sparse_stride > 0):
        raise ConfigError(
            f"model.sparse_stride={config.sparse_stride} with model.layers={list(config.layers)}: sparse layers need a "
            "stride of at least 1, and nothing else reads it."
        )
    if "linear" in config.layers:
        _check_linear(config)


def _check_linear(config: ModelConfig) -> None:
    """Linear attention has no scores that a cap, a bias or a sink could change."""
    for name in ("attention_softcap", "attention_scale", "sinks"):
        if getattr(config, name):
            raise ConfigError(f"model.{name}={getattr(config, name)} means nothing to linear layers; leave it out.")
    if config.position in ("alibi", "t5", "relative"):
        raise ConfigError(
            f"model.position={config.position!r} is a bias of scores, which linear layers do not have. "
            "Try rope, learned, sinusoidal or none."
        )


def _check_latent(config: ModelConfig) -> None:
    if not config.is_latent:
        for name in ("q_lora_rank", "rope_head_dim", "value_head_dim"):
            if getattr(config, name):
                raise ConfigError(
                    f"model.{name}={getattr(config, name)} belongs to latent attention; set model.kv_lora_rank too, or "
                    f"model.{name}=0."
                )
        return
    if config.num_kv_heads != config.num_heads:
        raise ConfigError(
            f"model.num_kv_heads={config.num_kv_heads} must be model.num_heads={config.num_heads} in latent attention: "
            "every head has keys of its own."
        )
    if config.position != "rope" or config.qk_norm != "none" or config.rope.partial != 1:
        raise ConfigError(
            f"latent attention (model.kv_lora_rank={config.kv_lora_rank}) has rotary positions on model.rope_head_dim "
            "channels, and norms in its latents: use model.position=rope, model.rope.partial=1, model.qk_norm=none."
        )
    if not 0 < config.rope_head_dim < config.head_dim:
        raise ConfigError(
            f"model.rope_head_dim={config.rope_head_dim} must lie between 0 and model.head_dim={config.head_dim}, "
            "of which it is a part."
        )


def _check_positions(config: ModelConfig) -> None:
    if config.position == "rope":
        config.rope.check_size(config.rotary_size)
    elif config.local_rope_theta or config.rope_layers != (True,):
        raise ConfigError(
            f"model.local_rope_theta and model.rope_layers are about rotary positions; model.position is "
            f"{config.position!r}."
        )
    if config.local_rope_theta and "window" not in config.layers:
        raise ConfigError(
            f"model.local_rope_theta={config.local_rope_theta} is for window layers; model.layers has none."
        )
    if config.position in ("sinusoidal", "relative") and config.hidden_size % 2:
        raise ConfigError(
            f"model.hidden_size={config.hidden_size} must be even with model.position={config.position!r}: half are "
            f"sines, half cosines. Try {config.hidden_size + 1}."
        )
    if config.position == "relative" and (config.attention_softcap or config.is_latent):
        raise ConfigError("model.position='relative' goes with neither a soft cap nor latent attention.")


def _check_ffn(config: ModelConfig) -> None:
    wrong = [n for n in config.dense_layers if not 0 <= n < config.num_layers]
    if wrong or (config.dense_layers and not config.num_experts):
        raise ConfigError(
            f"model.dense_layers={list(config.dense_layers)} must name layers of 0 to {config.num_layers - 1} of a "
            f"model with experts (model.num_experts={config.num_experts})."
        )
    if (not config.num_experts or config.dense_layers) and config.ffn_size < 1:
        raise ConfigError(f"model.ffn_size={config.ffn_size} must be at least 1: there are dense layers.")


def _check_experts(config: ModelConfig) -> None:
    E, groups, most = config.num_experts, config.expert_groups, config.groups_per_token
    if config.activation not in GATED:
        raise ConfigError(f"model.activation={config.activation!r} is not gated; experts take one of {list(GATED)}.")
    if E % groups or not most <= groups:
        raise ConfigError(
            f"model.expert_groups={groups} must divide model.num_experts={E} and be at least "
            f"model.groups_per_token={most}."
        )
    reachable = E // groups * most
    if not 1 <= config.experts_per_token <= reachable:
        where = f"model.num_experts={E}" if groups == 1 else f"the {reachable} experts of {most} of {groups} groups"
        raise ConfigError(f"model.experts_per_token={config.experts_per_token} must lie between 1 and {where}.")
    if config.selection_bias and groups > 1 and E // groups < 2:
        raise ConfigError(f"model.expert_groups={groups} leaves groups of one expert; their best two are asked for.")
    if config.expert_ffn_size < 1:
        raise ConfigError(f"model.expert_ffn_size={config.expert_ffn_size} must be at least 1.")
