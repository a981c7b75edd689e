"""Cross-field rules for ``ModelFields``. Each message names the value, the rule and the nearest valid value."""

from __future__ import annotations

import math
from dataclasses import fields

from longctx.architecture.fields import DeltaFields, GlobalFields, ModelFields, encoder_of
from longctx.architecture.image_rules import check_image
from longctx.architecture.layer_specs import mixers_of
from longctx.architecture.mixers.layer_kinds import MIXERS, READS
from longctx.architecture.types import check_types
from longctx.errors import ConfigError
from longctx.untrusted.strict_json import shown

GATED = ("swiglu", "geglu", "geglu_tanh", "swiglu_oai")
"""Activations that multiply two projections."""

UNGATED = ("gelu", "gelu_tanh", "quick_gelu", "relu", "relu2", "silu")
"""Activations of one projection."""

CHOICES: dict[str, tuple[str, ...]] = {
    "norm": ("rmsnorm", "layernorm"),
    "norm_order": ("pre", "post", "sandwich", "output", "hybrid"),
    "activation": GATED + UNGATED,
    "qk_norm": ("none", "head", "full"),
    "position": ("rope", "none", "learned", "sinusoidal", "sinusoidal_halves", "alibi", "t5", "relative"),
    "score_function": ("softmax", "sigmoid"),
    "balance_scope": ("sequence", "micro_batch", "global_batch"),
    "pair_head": ("none", "nsp", "sop"),
    "class_pool": ("first", "mean"),
}
"""Allowed values per text field."""

_AT_LEAST_ONE = (
    "hidden_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
    "expert_groups",
    "groups_per_token",
    "relative_buckets",
    "relative_max_distance",
)
_POSITIVE = ("norm_eps", "init_std", "embedding_scale", "residual_scale", "logit_scale", "routed_scale")
_NOT_NEGATIVE = (
    "embedding_std",
    "vocab_size",
    "classes",
    "encoder_layers",
    "mtp_layers",
    "embedding_size",
    "output_vocab_size",
    "segments",
    "position_offset",
    "num_experts",
    "shared_ffn_size",
    "balance_loss_weight",
    "attention_scale",
    "attention_softcap",
    "logit_softcap",
    "window",
    "sparse_stride",
    "q_lora_rank",
    "kv_lora_rank",
    "rope_head_dim",
    "value_head_dim",
    "delta_key_heads",
    "delta_value_heads",
    "delta_key_dim",
    "delta_value_dim",
    "global_head_dim",
    "global_kv_heads",
    "local_rope_theta",
    "router_z_loss_weight",
    "selection_bias_rate",
    "capacity_factor",
)

MAX_LAYERS = 4096
"""Layer limit, also for lists with one entry per layer."""
UPPER_BOUNDS = {
    "num_layers": MAX_LAYERS,
    "encoder_layers": MAX_LAYERS,
    "mtp_layers": 64,
    "num_experts": 2**16,
    "vocab_size": 2**32,
    "classes": 2**32,
    "output_vocab_size": 2**32,
    "hidden_size": 2**20,
    "embedding_size": 2**20,
    "segments": 2**16,
    "position_offset": 2**40,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**16,
    "value_head_dim": 2**16,
    "delta_key_heads": 2**14,
    "delta_value_heads": 2**14,
    "delta_key_dim": 2**16,
    "delta_value_dim": 2**16,
    "delta_conv": 2**10,
    "global_head_dim": 2**16,
    "global_kv_heads": 2**14,
    "rope_head_dim": 2**16,
    "q_lora_rank": 2**20,
    "kv_lora_rank": 2**20,
    "ffn_size": 2**22,
    "expert_ffn_size": 2**22,
    "shared_ffn_size": 2**22,
    "expert_groups": 2**16,
    "groups_per_token": 2**16,
    "experts_per_token": 2**16,
    "max_positions": 2**40,
    "window": 2**40,
    "sparse_stride": 2**40,
    "relative_buckets": 2**20,
    "relative_max_distance": 2**40,
}
"""Upper bounds far above any model, low enough that no product overflows and no loop over one takes long."""


def check_model(config: ModelFields) -> None:
    """Raise ConfigError for the first violated rule."""
    # Types and ranges first: the later rules compare and divide.
    check_types(config, "model")
    _check_numbers(config)
    # Values that later rules compare with.
    for name, choices in CHOICES.items():
        if getattr(config, name) not in choices:
            raise ConfigError(f"model.{name}={shown(getattr(config, name))} is unknown. Try one of {list(choices)}.")
    check_image(config)
    config.adapter.check_width(config.hidden_size)
    _check_heads(config)
    _check_layers(config)
    _check_mixers(config)
    _check_positions(config)
    _check_biases(config)
    _check_ends(config)
    _check_ffn(config)
    if config.num_experts:
        _check_experts(config)
    if config.encoder_layers:
        _check_encoder(config)
    if config.mtp_layers:
        _check_mtp(config)


def _check_mtp(config: ModelFields) -> None:
    """Raise ConfigError if multi-token prediction blocks cannot read the model's embeddings or residual stream.

    The blocks read the token embedding table, and hidden states after the last norm.
    """
    required = {
        "causal": True,
        "encoder_layers": 0,
        "shared_layers": False,
        "embedding_size": 0,
        "embedding_norm": False,
        "segments": 0,
        "head_transform": False,
    }
    actual = {name: getattr(config, name) for name in required}
    violations = [
        f"model.{name}={shown(actual[name])} (needs {shown(value)})"
        for name, value in required.items()
        if actual[name] != value
    ]
    if config.position not in ("rope", "none", "alibi"):
        violations.append(f"model.position={shown(config.position)} (needs rope, none or alibi)")
    if config.norm_order == "post":
        violations.append("model.norm_order='post' (needs another order)")
    if violations:
        raise ConfigError(
            f"model.mtp_layers={config.mtp_layers} is not supported with {', '.join(violations)}: an MTP "
            "block reads the next token's embedding and a hidden state.\nTry model.mtp_layers=0."
        )


def _check_encoder(config: ModelFields) -> None:
    """Raise ConfigError unless the model supports an encoder, and cross attention in the decoder's layers."""
    required = {
        "causal": (True, "decoder tokens cannot see later ones; an encoder-only model has model.encoder_layers=0"),
        "num_experts": (0, "expert load counts and routing replay cover only one stack"),
        "kv_lora_rank": (0, "cross attention has no latents"),
        "attention_gate": (False, "no published model with cross attention has such gates"),
        "shared_layers": (False, "no published model with cross attention shares them"),
    }
    for name, (value, why) in required.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"model.{name}={getattr(config, name)} is not supported with an encoder (model.encoder_layers="
                f"{config.encoder_layers}): {why}. Set model.{name}={str(value).lower()}."
            )
    if config.norm_order not in ("pre", "post"):
        raise ConfigError(
            f"model.norm_order={config.norm_order!r} is not supported with an encoder (model.encoder_layers="
            f"{config.encoder_layers}). Try 'pre' or 'post'."
        )
    for name in ("layers", "rope_layers"):
        count = len(getattr(config, name))
        # Patterns repeat over both stacks, so they must fit into the shallower one.
        if count > config.encoder_layers:
            raise ConfigError(
                f"model.{name} lists {count} layers, but the encoder has model.encoder_layers={config.encoder_layers}; "
                "the list repeats over each stack's depth. List fewer kinds, or add encoder layers."
            )
    # The encoder's own tokens are bidirectional, which some fields do not support.
    check_model(encoder_of(config))


def _check_numbers(config: ModelFields) -> None:
    """Raise ConfigError for numbers out of range, and for a norm offset without effect."""
    for name in _AT_LEAST_ONE:
        if getattr(config, name) < 1:
            raise ConfigError(f"model.{name}={getattr(config, name)} must be at least 1.")
    for name, most in UPPER_BOUNDS.items():
        if getattr(config, name) > most:
            raise ConfigError(f"model.{name}={shown(getattr(config, name))} must be at most {most:,}.")
    for name in _POSITIVE:
        if not 0 < getattr(config, name) < math.inf:
            raise ConfigError(f"model.{name}={getattr(config, name)} must be a positive number.")
    for name in _NOT_NEGATIVE:
        if not 0 <= getattr(config, name) < math.inf:
            raise ConfigError(f"model.{name}={getattr(config, name)} must not be negative; 0 disables it.")
    if config.norm_offset and config.norm == "layernorm":
        raise ConfigError(
            "model.norm_offset=true has no effect with model.norm='layernorm'. Use rmsnorm, or norm_offset=false."
        )
    if not 0 <= config.residual_dropout < 1:
        raise ConfigError(f"model.residual_dropout={config.residual_dropout} must be at least 0 and below 1.")
    if not 0 <= config.router_jitter < 1:
        raise ConfigError(f"model.router_jitter={config.router_jitter} must be at least 0 and below 1.")


def _check_heads(config: ModelFields) -> None:
    """Raise ConfigError unless each key/value head serves equally many query heads."""
    if config.num_heads % config.num_kv_heads:
        divisors = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
        raise ConfigError(
            f"model.num_kv_heads={config.num_kv_heads} does not divide model.num_heads={config.num_heads}.\n"
            f"Try one of {divisors}."
        )


def _check_layers(config: ModelFields) -> None:
    """Raise ConfigError for unknown layer kinds, and for a window or stride that no layer reads."""
    if not config.layers or not set(config.layers) <= set(MIXERS):
        raise ConfigError(
            f"model.layers={shown(list(config.layers))} must list one or more of {list(MIXERS)}; on the command line, "
            "without quotes: --model.layers full window."
        )
    for name in ("layers", "rope_layers"):
        count = len(getattr(config, name))
        # A longer pattern would describe layers that do not exist.
        if not 1 <= count <= config.num_layers:
            raise ConfigError(
                f"model.{name} lists {count} layers; with model.num_layers={config.num_layers} it must list 1 to "
                f"{config.num_layers}, which repeat over the depth."
            )
    if config.shared_layers:
        _check_shared(config)
    # An option without effect is an error: the model would differ from the intended one.
    for name, readers, example in (("window", "window and sparse", 4096), ("sparse_stride", "sparse", 128)):
        is_needed, value = is_read(config, name), getattr(config, name)
        if is_needed != (value > 0):
            hint = f"Try model.{name}=0, or add {readers} layers."
            if is_needed:
                hint = f"Set it, for example to {example}."
            raise ConfigError(
                f"model.{name}={value} with model.layers={list(config.layers)}: only {readers} layers read {name}, "
                f"and they need at least 1. {hint}"
            )


def _check_shared(config: ModelFields) -> None:
    """Raise ConfigError unless one block can serve as every layer."""
    if len(set(config.layers)) > 1 or len(set(config.rope_layers)) > 1:
        raise ConfigError(
            f"model.shared_layers=true uses one block for all layers, but model.layers={list(config.layers)}, "
            f"model.rope_layers={list(config.rope_layers)} differ between layers. List one kind."
        )
    if config.num_experts:
        raise ConfigError(
            f"model.shared_layers=true is not supported with experts (model.num_experts={config.num_experts}): "
            "expert load counts and routing replay are per layer. Set model.num_experts=0."
        )


def is_read(config: ModelFields, field: str) -> bool:
    """Return True if a layer in the config reads this field from ``READS``."""
    return any(field in READS.get(kind, ()) for kind in config.layers)


def _check_mixers(config: ModelFields) -> None:
    """Raise ConfigError for fields that a mixer in the model does not support, or that no mixer reads."""
    if not config.is_latent:
        for name in ("q_lora_rank", "rope_head_dim", "value_head_dim"):
            if getattr(config, name):
                raise ConfigError(
                    f"model.{name}={getattr(config, name)} requires latent attention; set model.kv_lora_rank too, or "
                    f"model.{name}=0."
                )
    # Sizes for layer kinds that the model does not have.
    for layer_kinds, group in (("gated_delta, kda and mamba2", DeltaFields), ("global", GlobalFields)):
        for field in fields(group):
            value = getattr(config, field.name)
            if value != field.default and not is_read(config, field.name):
                raise ConfigError(
                    f"model.{field.name}={shown(value)} applies to {layer_kinds} layers; add some to "
                    f"model.layers={list(config.layers)}, or leave it out."
                )
    mixers = mixers_of(config)
    if config.attention_gate and not any(mixer.core in ("softmax", "linear") for mixer in mixers):
        raise ConfigError(
            f"model.attention_gate=true needs softmax or linear layers; got model.layers={list(config.layers)}. "
            "Set false."
        )
    if config.v_norm and (
        config.is_latent or config.encoder_layers or not any(mixer.core in ("softmax", "linear") for mixer in mixers)
    ):
        raise ConfigError(
            f"model.v_norm=true needs softmax or linear layers in model.layers={list(config.layers)}, and supports "
            "neither latent attention nor encoder-decoders. Set false."
        )
    # One kind alone would make hybrid the same as pre or output.
    if config.norm_order == "hybrid" and len({mixer.core == "gated_delta" for mixer in mixers}) == 1:
        raise ConfigError(
            f"model.norm_order='hybrid' mixes gated_delta, kda or mamba2 layers with others; model.layers="
            f"{list(config.layers)} has only one sort. Use 'pre' or 'output'."
        )
    # Score modifiers need scores. An encoder-decoder has some in its cross attention.
    if not config.encoder_layers and not any(mixer.has_scores or mixer.core == "linear" for mixer in mixers):
        for name, unused in (("attention_softcap", 0), ("sinks", False), ("qk_norm", "none")):
            if getattr(config, name) != unused:
                raise ConfigError(
                    f"model.{name}={shown(getattr(config, name))} applies to softmax layers, but model.layers="
                    f"{list(config.layers)} contains other kinds only. Leave it out."
                )
    for mixer in mixers:
        mixer.check(config)


def _check_positions(config: ModelFields) -> None:
    """Raise ConfigError for invalid rotary positions, and for rotary fields with other position kinds."""
    if config.position == "rope":
        config.rope.check_size(config.rotary_size)
    else:
        # An option without effect is an error, not ignored silently: the model would differ from the intended one.
        # Values are compared with defaults, because a config file may list all fields.
        defaults = {"rope": type(config.rope)(), "rope_layers": (True,), "local_rope_theta": 0}
        for name, value in defaults.items():
            if getattr(config, name) != value:
                raise ConfigError(
                    f"model.{name} configures rotary positions, but model.position is {config.position!r}. Leave "
                    f"{name} out, or use model.position='rope'."
                )
    if not config.local_rope_theta:
        return
    if config.local_rope_theta <= 1:
        raise ConfigError(
            f"model.local_rope_theta={config.local_rope_theta} must be above 1, such as 10000; 0 disables it."
        )
    if not is_read(config, "local_rope_theta"):
        raise ConfigError(
            f"model.local_rope_theta={config.local_rope_theta} applies to window layers; add some to model.layers="
            f"{list(config.layers)}, or try model.local_rope_theta=0."
        )


def _check_biases(config: ModelFields) -> None:
    """Raise ConfigError for invalid fields in other position kinds."""
    # Added sinusoids have the embedding tables' width, sinusoidal distances the model's width.
    name, width = "hidden_size", config.hidden_size
    if config.position != "relative" and config.embedding_size:
        name, width = "embedding_size", config.embedding_size
    if config.position in ("sinusoidal", "sinusoidal_halves", "relative") and width % 2:
        raise ConfigError(
            f"model.{name}={width} must be even with model.position={config.position!r}: half are sines, half cosines. "
            f"Try {width + 1}."
        )
    if config.position != "t5":
        return
    buckets, farthest = config.relative_buckets, config.relative_max_distance
    # Each direction has its own buckets. Half hold one distance each; the others grow logarithmically up to the
    # farthest distance.
    num_directions = 1 if config.causal else 2
    if buckets < 2 * num_directions or buckets % num_directions:
        rule = "at least 2"
        if not config.causal:
            rule = "an even number, at least 4, for both directions' buckets (model.causal=false)"
        raise ConfigError(f"model.relative_buckets={buckets} must be {rule}; T5 has 32.")
    exact = buckets // num_directions // 2
    if farthest <= exact:
        raise ConfigError(
            f"model.relative_max_distance={farthest} must exceed {exact}, the number of single-distance "
            f"buckets with model.relative_buckets={buckets}. Try {4 * buckets}, as in T5."
        )


def _check_ends(config: ModelFields) -> None:
    """Raise ConfigError if embeddings and head do not fit together."""
    if config.position_offset and config.position != "learned":
        raise ConfigError(
            f"model.position_offset={config.position_offset} is an offset in the learned position table, but "
            f"model.position is {config.position!r}. Set model.position_offset=0, or model.position='learned'."
        )
    if config.output_vocab_size:
        _check_output_vocabulary(config)
    # The head transform maps hidden_size back to the embedding table's width.
    if config.embedding_size and not config.head_transform:
        raise ConfigError(
            f"model.embedding_size={config.embedding_size} is also the output head's input width, which needs the "
            "projection from model.head_transform=true. Set it, or model.embedding_size=0."
        )
    if config.pair_head != "none" and (config.causal or config.segments < 2):
        raise ConfigError(
            f"model.pair_head={config.pair_head!r} classifies two segments by the first token, which must see "
            f"both: it needs model.causal=false (now {str(config.causal).lower()}) and model.segments=2 (now "
            f"{config.segments})."
        )
    if config.head_transform and config.activation in GATED:
        raise ConfigError(
            f"model.head_transform=true uses the FFN's activation, but model.activation={config.activation!r} is "
            f"gated. Try one of {list(UNGATED)}."
        )


def _check_output_vocabulary(config: ModelFields) -> None:
    """Raise ConfigError unless the output head has its own weights, for fewer ids than the embedding table."""
    if config.output_vocab_size >= config.vocab_size:
        raise ConfigError(
            f"model.output_vocab_size={config.output_vocab_size} must be below model.vocab_size={config.vocab_size}. "
            "Try model.output_vocab_size=0, which gives every id an output."
        )
    if config.tie_embeddings:
        raise ConfigError(
            f"model.output_vocab_size={config.output_vocab_size} gives the output head fewer rows than the embedding "
            f"table, model.vocab_size={config.vocab_size}, but model.tie_embeddings=true makes them one matrix. Set "
            "model.tie_embeddings=false, or model.output_vocab_size=0."
        )


def _check_ffn(config: ModelFields) -> None:
    """Raise ConfigError unless dense layers exist in the model and have a width."""
    invalid_layers = [n for n in config.dense_layers if not 0 <= n < config.num_layers]
    if len(config.dense_layers) > config.num_layers:
        raise ConfigError(
            f"model.dense_layers lists {len(config.dense_layers)} layers, but model.num_layers={config.num_layers}."
        )
    if invalid_layers or (config.dense_layers and not config.num_experts):
        raise ConfigError(
            f"model.dense_layers={shown(list(config.dense_layers))} must list layers from 0 to {config.num_layers - 1} "
            f"in a model with experts (model.num_experts={config.num_experts})."
        )
    if config.num_experts and len(set(config.dense_layers)) == config.num_layers:
        raise ConfigError(
            f"model.dense_layers={list(config.dense_layers)} leaves no layer for model.num_experts="
            f"{config.num_experts}. Try model.num_experts=0, or fewer dense layers."
        )
    # If every layer has experts, the dense width is not read.
    if (not config.num_experts or config.dense_layers) and config.ffn_size < 1:
        raise ConfigError(f"model.ffn_size={config.ffn_size} must be at least 1: the model has dense layers.")


def _check_experts(config: ModelFields) -> None:
    """Raise ConfigError for an impossible expert selection, and for options without effect on it."""
    E, groups, most = config.num_experts, config.expert_groups, config.groups_per_token
    if config.activation not in GATED:
        raise ConfigError(f"model.activation={config.activation!r} is not gated; experts need one of {list(GATED)}.")
    if E % groups:
        divisors = [n for n in range(1, E + 1) if E % n == 0]
        raise ConfigError(f"model.expert_groups={groups} does not divide model.num_experts={E}. Try one of {divisors}.")
    if most > groups:
        raise ConfigError(f"model.groups_per_token={most} is more than model.expert_groups={groups}. Try {groups}.")
    # A token selects only among the experts in its best groups.
    reachable = E // groups * most
    if not 1 <= config.experts_per_token <= reachable:
        where = f"the {reachable} experts in {most} of {groups} groups"
        if groups == 1:
            where = f"model.num_experts={E}"
        raise ConfigError(
            f"model.experts_per_token={config.experts_per_token} must be between 1 and {where}.\n"
            f"Try --model.experts_per_token {min(max(1, config.experts_per_token), reachable)}."
        )
    # A group's score is the sum over its best two experts.
    if config.selection_bias and groups > 1 and E // groups < 2:
        raise ConfigError(
            f"model.expert_groups={groups} leaves one expert per group, but with model.selection_bias a group's best "
            f"two count. Try model.expert_groups={next(n for n in range(E // 2, 0, -1) if E % n == 0)}."
        )
    if config.expert_ffn_size < 1:
        raise ConfigError(f"model.expert_ffn_size={config.expert_ffn_size} must be at least 1.")
    if config.selection_bias_rate and not config.selection_bias:
        raise ConfigError(
            f"model.selection_bias_rate={config.selection_bias_rate} updates a bias that the model does not have. Set "
            "model.selection_bias=true, or model.selection_bias_rate=0."
        )
    # Below 1 the experts have fewer slots in total than there are tokens.
    if 0 < config.capacity_factor < 1:
        raise ConfigError(
            f"model.capacity_factor={config.capacity_factor} drops tokens even with a balanced load. Try 1.25, or 0 "
            "for dropless."
        )
