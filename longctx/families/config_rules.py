"""Common rules between config.json keys and ModelFields, to combine into a family's table."""

from __future__ import annotations

import logging
import math
from dataclasses import fields
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.architecture.model_rules import MAX_LAYERS
from longctx.errors import ConfigError
from longctx.families.spec import ConfigRule, HfConfig
from longctx.untrusted.strict_json import shown

log = logging.getLogger(__name__)

MAX_INTEGER = 2**40
"""Upper bound on any size, distance or length in a config.json."""
REQUIRED: Any = object()
"""Default for a key that config.json must have: the family's own default is too easily unintended."""

# Annotations are strings, because the dataclass module postpones their evaluation.
_TYPES = {f.name: f.type for f in fields(ModelFields)}


def same(
    key: str, name: str, *, default: Any = REQUIRED, also: tuple[str, ...] = (), least: float = -math.inf
) -> ConfigRule:
    """Return the rule for a key that is the field ``name``; ``also`` are other keys for it, read but not written."""

    keys = (key, *also)

    def read(hf: HfConfig) -> dict[str, Any]:
        value = typed(key, first_of(hf, keys, default), str(_TYPES[name]))
        if value < least:
            raise ConfigError(f"{key}={shown(value)} in config.json must be at least {least}.")
        return {name: value}

    return ConfigRule(keys=keys, read=read, write=lambda config: {key: getattr(config, name)})


def optional(key: str, name: str, *, default: Any = REQUIRED) -> ConfigRule:
    """Return the rule for a key that is the field ``name``, with null for 0."""

    def read(hf: HfConfig) -> dict[str, Any]:
        value = first_of(hf, (key,), default)
        if value is None:
            value = 0
        return {name: typed(key, value, str(_TYPES[name]))}

    return ConfigRule(keys=(key,), read=read, write=lambda config: {key: getattr(config, name) or None})


def only(key: str, *supported: Any, default: Any = REQUIRED, written: bool = True) -> ConfigRule:
    """Return the rule for a key that allows only ``supported``; the first is written, and absence means it too.

    ``default`` overrides the meaning of absence.
    """

    if default is REQUIRED:
        default = supported[0]
    if written:
        output = {key: supported[0]}
    else:
        output = {}

    def read(hf: HfConfig) -> dict[str, Any]:
        value = hf.get(key, default)
        # In Python True equals 1 and False equals 0.0; in a config.json they are different values.
        if not any(value == s and isinstance(value, bool) == isinstance(s, bool) for s in supported):
            choices = " or ".join(_format_value(s) for s in supported)
            raise ConfigError(f"{key}={shown(value)} is not supported by this decoder; supported: {choices}.")
        return {}

    return ConfigRule(keys=(key,), read=read, write=lambda _: dict(output))


def _format_value(value: Any) -> str:
    """Return a supported value as message text."""
    if value is None:
        return "absent"
    return repr(value)


def constant(**values: Any) -> ConfigRule:
    """Return the rule for fields with a fixed value in the family."""
    return ConfigRule(read=lambda _: values)


def translated(key: str, name: str, meanings: dict[str, str], *, default: Any = REQUIRED) -> ConfigRule:
    """Return the rule for a key with other names for the values of field ``name``.

    If several names have one meaning, the first is written. If no name fits, the first in the table is written: it
    reads back as another value, so the loss is detected.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        word = first_of(hf, (key,), default)
        if not isinstance(word, str) or word not in meanings:
            raise ConfigError(f"{key}={shown(word)} is not supported by this decoder; supported: {sorted(meanings)}.")
        return {name: meanings[word]}

    def write(config: ModelFields) -> dict[str, Any]:
        fitting = [word for word, value in meanings.items() if value == getattr(config, name)]
        return {key: (fitting or list(meanings))[0]}

    return ConfigRule(keys=(key,), read=read, write=write)


def both_biases(default: bool) -> ConfigRule:
    """Return the rule for one key that sets the biases in all four attention projections."""

    def read(hf: HfConfig) -> dict[str, Any]:
        value = typed("attention_bias", first_of(hf, ("attention_bias",), default), "bool")
        return {"qkv_bias": value, "o_bias": value}

    # A different output bias reads back as this one, so the loss is detected.
    return ConfigRule(keys=("attention_bias",), read=read, write=lambda config: {"attention_bias": config.qkv_bias})


def kv_heads(*, default_is_heads: bool = False) -> ConfigRule:
    """Return the rule for key/value heads; with ``default_is_heads``, null or absence means as many as query heads."""

    def read(hf: HfConfig) -> dict[str, Any]:
        key = "num_key_value_heads"
        default = REQUIRED
        if default_is_heads:
            default = None
        value = first_of(hf, (key,), default)
        if value is None and default_is_heads:
            value = integer(hf, "num_attention_heads")
        return {"num_kv_heads": typed(key, value, "int")}

    return ConfigRule(keys=("num_key_value_heads",), read=read, write=lambda c: {"num_key_value_heads": c.num_kv_heads})


def head_dim(default: int | None = None) -> ConfigRule:
    """Return the rule for the head size; null, and absence without a default, means hidden_size over the heads."""

    def read(hf: HfConfig) -> dict[str, Any]:
        value = first_of(hf, ("head_dim",), default)
        if value is None:
            return {"head_dim": width_over_heads(hf)}
        return {"head_dim": typed("head_dim", value, "int")}

    return ConfigRule(keys=("head_dim",), read=read, write=lambda config: {"head_dim": config.head_dim})


def divided_head_dim(width: str = "hidden_size", heads: str = "num_attention_heads") -> ConfigRule:
    """Return the rule for heads that share the model width; the key is accepted if it matches."""

    def read(hf: HfConfig) -> dict[str, Any]:
        divided = width_over_heads(hf, width, heads)
        if hf.get("head_dim", divided) not in (divided, None):
            raise ConfigError(f"head_dim={shown(hf['head_dim'])} is not supported here; supported: {width} / {heads}.")
        return {"head_dim": divided}

    return ConfigRule(keys=("head_dim",), read=read)


def width_of_heads(family: str) -> ConfigRule:
    """Return the rule that raises ConfigError on writing a width that the head count does not divide.

    transformers rejects such a model.
    """

    def write(config: ModelFields) -> dict[str, Any]:
        if config.hidden_size % config.num_heads:
            width = math.ceil(config.hidden_size / config.num_heads) * config.num_heads
            raise ConfigError(
                f"model.hidden_size={config.hidden_size} must be a multiple of model.num_heads={config.num_heads} in "
                f"transformers' {family} models. Try model.hidden_size={width}."
            )
        return {}

    return ConfigRule(read=lambda _: {}, write=write)


def all_heads(width: str = "hidden_size", heads: str = "num_attention_heads") -> ConfigRule:
    """Return the rule for as many key/value heads as query heads, which share the width."""

    def read(hf: HfConfig) -> dict[str, Any]:
        size, count = integer(hf, width), integer(hf, heads)
        if size != width_over_heads(hf, width, heads) * count:
            raise ConfigError(f"{width}={size} in config.json is not a multiple of {heads}={count}.")
        return {"num_kv_heads": count}

    return ConfigRule(read=read)


def unsupported_dropout(key: str, default: float = 0.1, *, target: str = "attention weights") -> ConfigRule:
    """Return the rule for a dropout that is never applied here; ``default`` is the rate if the key is absent.

    A warning is enough, because it matters only in training.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        rate = typed(key, hf.get(key, default), "float")
        if rate:
            log.warning("%s=%s of config.json is ignored: this decoder never drops %s in training", key, rate, target)
        return {}

    return ConfigRule(keys=(key,), read=read, write=lambda _: {key: 0.0})


def encoder_decoder_shared(encoder: str, decoder: str, name: str) -> ConfigRule:
    """Return the rule for an encoder key and a decoder key that are one field here and must match."""

    def read(hf: HfConfig) -> dict[str, Any]:
        first, second = integer(hf, encoder), integer(hf, decoder)
        if first != second:
            raise ConfigError(
                f"{encoder}={first} and {decoder}={second} in config.json must be equal: encoder and decoder share "
                f"model.{name} here. Only their layer counts may differ."
            )
        return {name: first}

    def write(config: ModelFields) -> dict[str, Any]:
        return {encoder: getattr(config, name), decoder: getattr(config, name)}

    return ConfigRule(keys=(encoder, decoder), read=read, write=write)


def width_over_heads(hf: HfConfig, width: str = "hidden_size", heads: str = "num_attention_heads") -> int:
    """Return the model width divided by the head count."""
    size, count = integer(hf, width), integer(hf, heads)
    if count < 1:
        raise ConfigError(f"{heads}={count} in config.json must be at least 1.")
    return size // count


def integer(hf: HfConfig, key: str, default: Any = REQUIRED) -> int:
    """Return a key's value; raise ConfigError unless it is an integer within bounds."""
    value = typed(key, first_of(hf, (key,), default), "int")
    if abs(value) > MAX_INTEGER:
        raise ConfigError(f"{key}={shown(value)} in config.json is out of range: at most {MAX_INTEGER:,}.")
    return value


def layer_count(hf: HfConfig) -> int:
    """Return the layer count, checked before lists with an entry per layer are built."""
    count = integer(hf, "num_hidden_layers")
    if not 1 <= count <= MAX_LAYERS:
        raise ConfigError(f"num_hidden_layers={count} in config.json must be between 1 and {MAX_LAYERS:,}.")
    return count


def first_of(hf: HfConfig, keys: tuple[str, ...], default: Any = REQUIRED) -> Any:
    """Return the present keys' common value; raise ConfigError if two differ, or if a required one is missing."""
    # transformers versions differ in the key; a file that passed through two of them may have both.
    found = {key: hf[key] for key in keys if key in hf}
    if len({repr(value) for value in found.values()}) > 1:
        raise ConfigError(f"config.json contradicts itself: {shown(found)}. Keep one of them.")
    if not found and default is REQUIRED:
        raise ConfigError(f"config.json of a {hf.get('model_type')} model has no {keys[0]}.")
    return next(iter(found.values()), default)


def typed(key: str, value: Any, kind: str) -> Any:
    """Return the value if it has the named type, otherwise raise ConfigError. Integers are accepted for floats."""
    if kind == "float" and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    # By name, not by isinstance: in Python True is an int.
    if type(value).__name__ != kind:
        raise ConfigError(f"{key}={shown(value)} in config.json must be of type {kind}.")
    return value


GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu": "geglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
"""transformers' names for the gate's function."""

SIZES = (
    same("vocab_size", "vocab_size"),
    same("hidden_size", "hidden_size"),
    same("num_hidden_layers", "num_layers"),
    same("num_attention_heads", "num_heads"),
    same("max_position_embeddings", "max_positions"),
    same("initializer_range", "init_std", default=0.02),
)

ONE_STACK = only("is_encoder_decoder", False, written=False)
UNUSED = (
    ONE_STACK,
    only("per_layer_config", None, written=False),
)
"""Keys that transformers may write, and that change the model with any other value."""


NO_ATTENTION_DROPOUT = only("attention_dropout", 0.0, None)


def llama_like(
    *others: ConfigRule, eps: float = 1e-6, tied: bool = False, no_dropout: ConfigRule = NO_ATTENTION_DROPOUT
) -> tuple[ConfigRule, ...]:
    """Return the rules for all families with RMSNorm and gated FFNs, followed by a family's ``others``.

    ``eps`` and ``tied`` are defaults for absent keys; ``no_dropout`` is for a family with another class default.
    """
    return (
        *SIZES,
        *UNUSED,
        same("rms_norm_eps", "norm_eps", default=eps),
        same("tie_word_embeddings", "tie_embeddings", default=tied),
        translated("hidden_act", "activation", GATED_ACTIVATIONS, default="silu"),
        no_dropout,
        *others,
    )
