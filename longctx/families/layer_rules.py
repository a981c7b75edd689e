"""Rules for differences between layers: attention kinds, windows, positions, dense and expert FFNs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.families.config_rules import first_of, integer, layer_count, typed
from longctx.families.spec import ConfigRule, HfConfig
from longctx.untrusted.strict_json import shown

FULL, WINDOW, LINEAR = "full_attention", "sliding_attention", "linear_attention"
_OURS = {FULL: "full", WINDOW: "window"}

T = TypeVar("T")
Kinds = Callable[[HfConfig, int], list[str]]
"""Layer kinds from config.json and the layer count, if config.json has no layer_types."""


def full_attention() -> ConfigRule:
    """Return the rule for families without windows: layer_types may be present if all are full."""

    def read(hf: HfConfig) -> dict[str, Any]:
        kinds = hf.get("layer_types")
        if kinds is not None and set(_validate_kinds(kinds, hf)) != {FULL}:
            raise ConfigError(f"layer_types={shown(kinds)} is not supported by this decoder; supported: only {FULL}.")
        return {}

    return ConfigRule(keys=("layer_types",), read=read)


def one_window(default: int | None) -> ConfigRule:
    """Return the rule for ``sliding_window`` in all layers, or null (Mistral)."""

    def read(hf: HfConfig) -> dict[str, Any]:
        # Null disables the window; an absent key means the default.
        window = hf.get("sliding_window", default)
        return _uniform(hf, window)

    def write(config: ModelFields) -> dict[str, Any]:
        return {"sliding_window": config.window or None}

    return ConfigRule(keys=("sliding_window", "layer_types"), read=read, write=write)


def one_switched_window(*, named: bool = False) -> ConfigRule:
    """Return the rule for ``sliding_window`` with a switch ``use_sliding_window`` (Qwen3-MoE).

    max_window_layers has no effect here. With ``named``, layer_types must be present if the switch is on (Qwen2-MoE):
    transformers versions differ in how they read its absence, and a mixture.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        is_on = _switched_on(hf)
        if is_on and named and hf.get("layer_types") is None:
            raise ConfigError(
                f"use_sliding_window={is_on} without layer_types is not supported: versions of transformers differ in "
                f"which layers have windows. Add layer_types ({WINDOW} in all), or set it to false."
            )
        window = None
        if is_on:
            window = hf.get("sliding_window", 4096)
        return _uniform(hf, window)

    def write(config: ModelFields) -> dict[str, Any]:
        written: dict[str, Any] = {"use_sliding_window": bool(config.window)}
        if config.window:
            written["sliding_window"] = config.window
        # Write both, so that every transformers version reads a window in all layers.
        if config.window and named:
            written |= {"max_window_layers": 0, "layer_types": [WINDOW] * config.num_layers}
        return written

    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return ConfigRule(keys=keys, read=read, write=write)


def switched_windows(kinds: Kinds) -> ConfigRule:
    """Return the rule for windows in layers named by layer_types, with a switch ``use_sliding_window`` (Qwen)."""

    def read(hf: HfConfig) -> dict[str, Any]:
        # If switched off, windows in layer_types are a contradiction, which ``_layers`` rejects.
        if not _switched_on(hf):
            return _layers(hf, _layer_types(hf) or [FULL] * layer_count(hf), None)
        return _layers(hf, _layer_types(hf) or kinds(hf, layer_count(hf)), hf.get("sliding_window", 4096))

    def write(config: ModelFields) -> dict[str, Any]:
        if not config.window:
            return {"use_sliding_window": False}
        named = _window_layer_types(config)
        # For transformers versions without layer_types.
        leading = next((n for n, kind in enumerate(named) if kind == WINDOW), len(named))
        return {
            "use_sliding_window": True,
            "sliding_window": config.window,
            "max_window_layers": leading,
            "layer_types": named,
        }

    keys = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return ConfigRule(keys=keys, read=read, write=write)


def windows(default: int, kinds: Kinds, *, pattern_key: str = "") -> ConfigRule:
    """Return the rule for windows in layers named by layer_types (Gemma, GPT-OSS).

    ``pattern_key`` is for transformers versions before layer_types: the interval between full layers.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        return _layers(hf, _layer_types(hf) or kinds(hf, layer_count(hf)), hf.get("sliding_window", default))

    def write(config: ModelFields) -> dict[str, Any]:
        named = _window_layer_types(config)
        written = {"sliding_window": config.window or default, "layer_types": named}
        # The old key can only express windows followed by one full layer, repeated.
        pattern = shortest(named)
        if pattern_key and pattern[-1] == FULL and pattern.count(FULL) == 1:
            written[pattern_key] = len(pattern)
        return written

    keys: tuple[str, ...] = ("sliding_window", "layer_types")
    if pattern_key:
        keys += (pattern_key, f"_{pattern_key}")
    return ConfigRule(keys=keys, read=read, write=write)


def has_windows(hf: HfConfig, kinds: Kinds) -> bool:
    """Return True if a family with ``windows(…, kinds)`` has window layers here."""
    return WINDOW in (_layer_types(hf) or kinds(hf, layer_count(hf)))


def from_layer_on(hf: HfConfig, count: int) -> list[str]:
    """Return full attention below ``max_window_layers``, and windows from there on (Qwen2, Qwen3)."""
    leading = integer(hf, "max_window_layers", 28)
    return [FULL if layer < leading else WINDOW for layer in range(count)]


def every_other(hf: HfConfig, count: int) -> list[str]:
    """Return windows in layers 0, 2, 4, … (Gemma 2, GPT-OSS)."""
    return _kinds(count, lambda layer: layer % 2 == 0)


def every_nth_full(hf: HfConfig, count: int) -> list[str]:
    """Return full attention in every ``sliding_window_pattern``-th layer (Gemma 3)."""
    every = first_of(hf, ("sliding_window_pattern", "_sliding_window_pattern"), 6)
    if typed("sliding_window_pattern", every, "int") < 1:
        raise ConfigError(f"sliding_window_pattern={every} in config.json must be at least 1.")
    return _kinds(count, lambda layer: (layer + 1) % every != 0)


def _kinds(count: int, has_window: Callable[[int], bool]) -> list[str]:
    """Return layer_types for ``count`` layers."""
    kinds = [FULL] * count
    for layer in range(count):
        if has_window(layer):
            kinds[layer] = WINDOW
    return kinds


def rotary_layers() -> ConfigRule:
    """Return the rule for layers without positions: 0 in ``no_rope_layers``, by default every fourth (SmolLM3)."""
    key, every = "no_rope_layers", "no_rope_layer_interval"

    def read(hf: HfConfig) -> dict[str, Any]:
        count, interval = layer_count(hf), integer(hf, every, 4)
        if interval < 1:
            raise ConfigError(f"{every}={interval} in config.json must be at least 1.")
        given = hf.get(key)
        if given is None:
            given = [int((n + 1) % interval != 0) for n in range(count)]
        if not isinstance(given, list) or len(given) != count or any(value not in (0, 1) for value in given):
            raise ConfigError(
                f"{key}={shown(given)} in config.json must be a list of {count}, one per layer, each 0 or 1."
            )
        if not any(given):
            raise ConfigError(f"{key} in config.json leaves no layer with positions, which is not supported here.")
        return {"rope_layers": tuple(bool(value) for value in shortest(given))}

    def write(config: ModelFields) -> dict[str, Any]:
        return {key: [int(config.has_rope(layer)) for layer in range(config.num_layers)]}

    return ConfigRule(keys=(key, every), read=read, write=write)


def delta_layers(kind: str) -> ConfigRule:
    """Return the rule for gated delta layers of this kind, and their sizes (Qwen).

    layer_types calls them linear attention.
    """
    sizes = {
        "linear_num_key_heads": "delta_key_heads",
        "linear_num_value_heads": "delta_value_heads",
        "linear_key_head_dim": "delta_key_dim",
        "linear_value_head_dim": "delta_value_dim",
        "linear_conv_kernel_dim": "delta_conv",
    }
    defaults = {"delta_key_heads": 16, "delta_value_heads": 32, "delta_key_dim": 128, "delta_value_dim": 128}
    every = "full_attention_interval"

    def read(hf: HfConfig) -> dict[str, Any]:
        count, interval = layer_count(hf), integer(hf, every, 4)
        if interval < 1:
            raise ConfigError(f"{every}={interval} in config.json must be at least 1.")
        kinds = hf.get("layer_types")
        if kinds is None:
            kinds = [LINEAR if (n + 1) % interval else FULL for n in range(count)]
        if not isinstance(kinds, list) or len(kinds) != count or any(name not in (FULL, LINEAR) for name in kinds):
            raise ConfigError(
                f"layer_types={shown(kinds)} is not supported by this decoder; supported: a list of {count}, one per "
                f"layer, each {FULL} or {LINEAR}."
            )
        found: dict[str, Any] = {"layers": tuple({FULL: "full", LINEAR: kind}[name] for name in shortest(kinds))}
        # A model without such layers does not need their sizes.
        if LINEAR in kinds:
            found |= {ours: integer(hf, key, defaults.get(ours, 4)) for key, ours in sizes.items()}
        return found

    def write(config: ModelFields) -> dict[str, Any]:
        names = [{"full": FULL, kind: LINEAR}.get(config.layer_kind(n), FULL) for n in range(config.num_layers)]
        written = dict(zip(sizes, config.delta_sizes, strict=True))
        return {"layer_types": names, **written}

    return ConfigRule(keys=("layer_types", every, *sizes), read=read, write=write)


def sparse_steps() -> ConfigRule:
    """Return the rule for dense layers: listed in ``mlp_only_layers``, or skipped by ``decoder_sparse_step`` (Qwen)."""

    def read(hf: HfConfig) -> dict[str, Any]:
        count, step = layer_count(hf), integer(hf, "decoder_sparse_step", 1)
        # Null and absent name no layer.
        named = hf.get("mlp_only_layers") or []
        if step < 1 or not _are_layers(named, count):
            raise ConfigError(
                f"decoder_sparse_step={step} and mlp_only_layers={shown(named)} in config.json must be a number of at "
                f"least 1 and a list of layers from 0 to {count - 1}."
            )
        return {"dense_layers": tuple(n for n in range(count) if n in named or (n + 1) % step)}

    def write(config: ModelFields) -> dict[str, Any]:
        # A list of layers can express any selection; a step cannot.
        return {"decoder_sparse_step": 1, "mlp_only_layers": sorted(config.dense_layers)}

    return ConfigRule(keys=("decoder_sparse_step", "mlp_only_layers"), read=read, write=write)


def _are_layers(value: Any, count: int) -> bool:
    """Return True if a value is a list of valid layer numbers, no longer than the layer count."""
    return (
        isinstance(value, list)
        and len(value) <= count
        and all(type(layer) is int and 0 <= layer < count for layer in value)
    )


def first_dense(default: int) -> ConfigRule:
    """Return the rule for dense FFNs in the first ``first_k_dense_replace`` layers (DeepSeek)."""
    key = "first_k_dense_replace"

    def read(hf: HfConfig) -> dict[str, Any]:
        dense = integer(hf, key, default)
        if dense < 0:
            raise ConfigError(f"{key}={dense} in config.json must not be negative.")
        return {"dense_layers": tuple(range(min(dense, layer_count(hf))))}

    return ConfigRule(keys=(key,), read=read, write=lambda config: {key: len(config.dense_layers)})


def _uniform(hf: HfConfig, window: Any) -> dict[str, Any]:
    """Return the fields for windows in all layers or in no layer; raise ConfigError if layer_types differs."""
    expected = _kinds(layer_count(hf), lambda _: window is not None)
    given = _layer_types(hf)
    if given is not None and given != expected:
        raise ConfigError(
            f"layer_types={shown(given)} is not supported by this decoder: a {hf.get('model_type')} model with "
            f"sliding_window={shown(window)} has {expected[0]} in all layers."
        )
    return _layers(hf, expected, window)


def _layers(hf: HfConfig, kinds: list[str], window: Any) -> dict[str, Any]:
    """Return the fields for these layer kinds; raise ConfigError if they need a window and it is missing."""
    if WINDOW not in kinds:
        return {"layers": ("full",), "window": 0}
    if window is None or typed("sliding_window", window, "int") < 1:
        raise ConfigError(
            f"sliding_window={shown(window)} (use_sliding_window={shown(hf.get('use_sliding_window'))}) does not match "
            f"{WINDOW} in layer_types={shown(kinds)}; it must be at least 1."
        )
    # The shortest pattern: a model with 32 window layers names "window" once, also in our files and messages.
    return {"layers": tuple(_OURS[kind] for kind in shortest(kinds)), "window": window}


def _switched_on(hf: HfConfig) -> bool:
    """Return ``use_sliding_window``, which enables windows in the Qwen families."""
    return typed("use_sliding_window", hf.get("use_sliding_window", False), "bool")


def _layer_types(hf: HfConfig) -> list[str] | None:
    """Return layer_types from config.json; None if absent."""
    kinds = hf.get("layer_types")
    if kinds is None:
        return None
    return _validate_kinds(kinds, hf)


def _validate_kinds(kinds: Any, hf: HfConfig) -> list[str]:
    """Return the value of layer_types; raise ConfigError unless it names a supported kind for each layer."""
    count = layer_count(hf)
    if not isinstance(kinds, list) or len(kinds) != count or any(kind not in (FULL, WINDOW) for kind in kinds):
        raise ConfigError(
            f"layer_types={shown(kinds)} is not supported by this decoder; supported: a list of {count}, one per "
            f"layer, each {FULL} or {WINDOW}."
        )
    return kinds


def _window_layer_types(config: ModelFields) -> list[str]:
    """Return a config's layer_types."""
    return _kinds(config.num_layers, lambda layer: config.layer_kind(layer) == "window")


def shortest(kinds: list[T]) -> tuple[T, ...]:
    """Return the shortest prefix that gives all ``kinds`` when repeated."""
    count = len(kinds)
    # The full list always matches.
    sizes = (n for n in range(1, count + 1) if all(kinds[i] == kinds[i % n] for i in range(count)))
    return tuple(kinds[: next(sizes)])
