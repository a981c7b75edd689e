"""Rotary positions in config.json: ``rope_theta`` and ``rope_scaling`` (transformers 4), ``rope_parameters`` (5).

Both are written and both are read; if both are present they must match.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.architecture.rope import Rope
from longctx.errors import ConfigError
from longctx.families.config_rules import integer, typed
from longctx.families.layer_rules import FULL, WINDOW, Kinds, has_windows
from longctx.families.leftover import IN_ROPE_TABLES, how_to_delete
from longctx.families.spec import ConfigRule, HfConfig
from longctx.untrusted.strict_json import shown

_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor", "original_max_position_embeddings"}),
    "yarn": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow"}
        | {"mscale", "mscale_all_dim", "truncate"}
    ),
    "longrope": frozenset(
        {"factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"}
    ),
    "llama3": frozenset({"factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"}),
}
"""Keys that each rope kind reads, in addition to its name and base."""
_PARTIAL = "partial_rotary_factor"
_ALWAYS = {"rope_type", "type", "rope_theta", _PARTIAL}
_TABLE_KEYS = ("rope_scaling", "rope_parameters")
_ORIGINAL = "original_max_position_embeddings"
"""Also a top-level key for longrope, which transformers 4 reads."""


def rotary(
    *,
    theta: float = 10_000.0,
    default: Mapping[str, Any] | None = None,
    interleaved: bool = False,
    interleaved_key: str = "",
    scales_scores: bool = False,
    partial: float | None = None,
    size_key: str = "",
    names_original: bool = False,
    ignored: frozenset[str] = frozenset(),
    growth_key: str = "",
) -> ConfigRule:
    """Return the rule for one rope in all layers.

    ``theta`` and ``default`` are the base and scaling for a config.json without them. ``interleaved`` (or its key)
    selects which channels form a pair. ``scales_scores`` is for families in which ``mscale_all_dim`` also scales full
    scores (DeepSeek); in others the two mscales only determine the attention factor. ``partial`` is the default share
    of rotary channels; None for families that rotate all. ``size_key`` gives the same as a channel count. With
    ``names_original``, every config.json names the original length, even without scaling. Tables may contain the
    ``ignored`` keys, which are irrelevant to text positions. ``growth_key`` is the key for ``query_growth``.
    """

    def read(hf: HfConfig) -> dict[str, Any]:
        share = partial
        if share is None:
            _check_partial("config.json", hf)
        elif hf.get(_PARTIAL) is not None:
            share = _number("config.json", hf, _PARTIAL)
        elif hf.get(size_key) is not None:
            share = integer(hf, size_key) / integer(hf, "head_dim")
        # Families without such a key leave it empty, and no config.json has an empty key.
        pairs = hf.get(interleaved_key, interleaved)
        if not isinstance(pairs, bool):
            raise ConfigError(f"{interleaved_key}={shown(pairs)} in config.json must be of type bool.")
        if names_original and not _has_scaling(hf):
            hf = _without_original(hf)
        given = {where: _with_original(hf, _table(where, hf[where])) for where in _TABLE_KEYS if hf.get(where)}
        given = {where: {k: v for k, v in table.items() if k not in ignored} for where, table in given.items()}
        if _ORIGINAL in hf and not given:
            raise ConfigError(f"{_ORIGINAL}={shown(hf[_ORIGINAL])} in config.json has no effect without rope_scaling.")
        base = _base({"rope_theta": hf} | given, theta)
        # Read each table separately: they may write one rope in two ways, and still match as ropes.
        found = {
            where: _rope(
                where,
                table,
                hf,
                theta=base,
                interleaved=pairs,
                scales_scores=scales_scores,
                partial=share,
                growth_key=growth_key,
            )
            for where, table in (given or {"rope_parameters": default or {}}).items()
        }
        return {"rope": _common_rope(found)}

    def write(config: ModelFields) -> dict[str, Any]:
        written = _rope_keys(config, config.rope, scales_scores=scales_scores)
        if config.rope.query_growth:
            written |= {where: {**written[where], growth_key: config.rope.query_growth} for where in _TABLE_KEYS}
        if interleaved_key:
            written[interleaved_key] = config.rope.interleaved
        if partial is not None:
            written = _with_partial(written, config.rope.partial)
        return written

    keys = ("rope_theta", "partial_rotary_factor", _ORIGINAL, *_TABLE_KEYS)
    keys += tuple(key for key in (interleaved_key, size_key) if key)
    return ConfigRule(keys=keys, read=read, write=write)


def global_and_local_rotary(*, theta: float, local_theta: float, kinds: Kinds) -> ConfigRule:
    """Return the rule for a rope in full layers and a window base (Gemma 3); ``kinds`` as in ``windows``."""

    def read(hf: HfConfig) -> dict[str, Any]:
        _check_partial("config.json", hf)
        nested = _nested(hf.get("rope_parameters"))
        tables = {"rope_scaling": hf.get("rope_scaling"), "rope_parameters": nested.get(FULL)}
        given = {where: _table(where, table) for where, table in tables.items() if table}
        local = _table("rope_parameters", nested.get(WINDOW) or {})
        if _kind("rope_parameters", local) != "default":
            raise ConfigError(f"rope_parameters={{{WINDOW!r}: {shown(local)}}} is not supported; supported: 'default'.")
        base = _base({"rope_theta": hf} | given, theta)
        found = {where: _rope(where, table, hf, theta=base) for where, table in (given or {"": {}}).items()}
        of_window = {"rope_theta": hf.get("rope_local_base_freq")}
        local_base = _base({"rope_local_base_freq": of_window, "rope_parameters": local}, local_theta)
        # Without window layers the local base is not read, and a field that is not read is rejected.
        if not has_windows(hf, kinds):
            local_base = 0.0
        return {"rope": _common_rope(found), "local_rope_theta": local_base}

    def write(config: ModelFields) -> dict[str, Any]:
        written = _rope_keys(config, config.rope)
        if not written:
            return {}
        local = config.local_rope_theta or config.rope.theta
        tables = {FULL: written["rope_parameters"], WINDOW: {"rope_type": "default", "rope_theta": local}}
        return written | {"rope_local_base_freq": local, "rope_parameters": tables}

    keys = ("rope_theta", "rope_local_base_freq", "partial_rotary_factor", *_TABLE_KEYS)
    return ConfigRule(keys=keys, read=read, write=write)


def effective_rope(rope: Rope, rotary_size: int) -> dict[str, Any]:
    """Return the fields that a rope's kind reads; NTK-aware scaling is the default kind with a larger base."""
    kind, theta = rope.kind, rope.theta
    if rope.kind == "ntk":
        kind, theta = "default", _ntk_theta(rope, rotary_size)
    values = {
        "kind": kind,
        "theta": theta,
        "partial": rope.partial,
        "interleaved": rope.interleaved,
        "scale": rope.scale(),
        "score_scale": rope.score_scale(),
    }
    fields = {
        "linear": ("factor",),
        "dynamic": ("factor", "original_max_positions"),
        "yarn": ("factor", "original_max_positions", "beta_fast", "beta_slow", "truncate"),
        "longrope": ("original_max_positions", "short_factor", "long_factor"),
        "llama3": ("factor", "original_max_positions", "low_freq_factor", "high_freq_factor"),
        "proportional": ("factor",),
    }.get(rope.kind, ())
    if rope.query_growth:
        values["query_growth"] = rope.query_growth
    return values | {name: getattr(rope, name) for name in fields}


def _rope(
    where: str,
    table: Mapping[str, Any],
    hf: HfConfig,
    *,
    theta: float,
    interleaved: bool = False,
    scales_scores: bool = False,
    partial: float | None = None,
    growth_key: str = "",
) -> Rope:
    """Return the rope that one table describes; ``partial`` and ``growth_key`` as for ``rotary``."""
    if partial is None:
        _check_partial(where, table)
        partial = 1.0
    elif table.get(_PARTIAL) is not None:
        partial = _number(where, table, _PARTIAL)
    kind = _kind(where, table)
    if unknown := sorted(set(table) - _KEYS[kind] - _ALWAYS - IN_ROPE_TABLES - {growth_key}):
        raise ConfigError(
            f"{where}={shown(dict(table))}: {shown(unknown)} are not keys of rope_type {shown(kind)} here.\n"
            f"{how_to_delete(unknown)}"
        )
    values: dict[str, Any] = {"theta": theta, "kind": kind, "interleaved": interleaved, "partial": partial}
    if table.get(growth_key):
        values["query_growth"] = _number(where, table, growth_key)
    if kind == "default":
        return Rope(**values)
    longest = integer(hf, "max_position_embeddings")
    # Linear scaling divides every frequency at any length.
    if kind != "linear":
        values["original_max_positions"] = _original(where, table, longest, kind)
    values["factor"] = _factor(where, table, longest, values.get("original_max_positions"))
    for key in ("attention_factor", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor"):
        if table.get(key) is not None:
            values[key] = _number(where, table, key)
    if kind == "llama3":
        values |= {key: _number(where, table, key) for key in ("low_freq_factor", "high_freq_factor")}
    if kind == "longrope":
        values |= {key: _numbers(where, table, key) for key in ("short_factor", "long_factor")}
    if kind == "yarn":
        values["truncate"] = table.get("truncate", True) is True
        values |= _mscales(where, table, values, scales_scores)
    return Rope(**values)


def _mscales(where: str, table: Mapping[str, Any], values: dict[str, Any], scales_scores: bool) -> dict[str, Any]:
    """Return DeepSeek's two weights, or for other families the attention factor that transformers derives from them."""
    given: dict[str, Any] = {"mscale": 0.0, "mscale_all_dim": 0.0}
    for key in given:
        if table.get(key) is not None:
            given[key] = _number(where, table, key)
    if scales_scores:
        return given
    # An explicit attention factor takes precedence over one derived from the two.
    if all(given.values()) and not values.get("attention_factor"):
        return {"attention_factor": Rope(**values, **given).scale()}
    return {}


def _original(where: str, table: Mapping[str, Any], longest: int, kind: str) -> int:
    """Return the original length: max_position_embeddings if absent, as in transformers."""
    original = table.get(_ORIGINAL)
    if original is None:
        return longest
    # transformers always scales a dynamic rope from max_position_embeddings on, ignoring the table.
    if kind == "dynamic" and original != longest:
        raise ConfigError(f"{where}: {_ORIGINAL}={shown(original)} must equal max_position_embeddings={longest}.")
    return typed(f"{where}: {_ORIGINAL}", original, "int")


def _factor(where: str, table: Mapping[str, Any], longest: int, original: int | None) -> float:
    """Return the factor; if it is absent, the growth from the original length."""
    if table.get("factor") is not None:
        return _number(where, table, "factor")
    if not original or table.get(_ORIGINAL) is None:
        raise ConfigError(f"{where}={shown(dict(table))} has no factor.")
    return longest / original


def _rope_keys(config: ModelFields, rope: Rope, *, scales_scores: bool = False) -> dict[str, Any]:
    """Return one rope's keys for both transformers versions."""
    if config.position != "rope":
        return {}
    if rope.kind == "default":
        return _default_rope(rope.theta)
    # transformers has no fixed NTK-aware scaling; it is the default kind with a larger base.
    if rope.kind == "ntk":
        return _default_rope(_ntk_theta(rope, config.rotary_size))
    scaling = {"rope_type": rope.kind, **_parameters(rope, config.max_positions, scales_scores)}
    written: dict[str, Any] = {
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
        "rope_parameters": scaling | {"rope_theta": rope.theta},
    }
    # transformers scales beyond this length, ignoring the table.
    if rope.kind == "dynamic":
        written["max_position_embeddings"] = rope.original_max_positions
    if rope.kind == "longrope":
        written[_ORIGINAL] = rope.original_max_positions
    return written


def _default_rope(theta: float) -> dict[str, Any]:
    """Return the keys for a rope of the default kind."""
    return {"rope_theta": theta, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def _parameters(rope: Rope, longest: int, scales_scores: bool) -> dict[str, Any]:
    """Return the keys for a scaled rope."""
    keys: dict[str, Any] = {"factor": rope.factor}
    if rope.kind in ("yarn", "longrope", "llama3"):
        keys[_ORIGINAL] = rope.original_max_positions
    if rope.kind == "llama3":
        keys |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "longrope":
        keys |= {"short_factor": list(rope.short_factor), "long_factor": list(rope.long_factor)}
    # For longrope, transformers 4 derives another factor from the two lengths.
    derives = rope.kind == "longrope" and rope.factor * rope.original_max_positions != longest
    if rope.attention_factor or derives:
        keys["attention_factor"] = rope.scale()
    if rope.kind == "yarn":
        keys |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        if scales_scores:
            given = {"mscale": rope.mscale, "mscale_all_dim": rope.mscale_all_dim}
            keys |= {key: value for key, value in given.items() if value}
    return keys


def _ntk_theta(rope: Rope, rotary_size: int) -> float:
    """Return the base for fixed NTK-aware scaling, from the slowest pair's frequency."""
    # A single pair has frequency 1 for every base.
    if rotary_size <= 2:
        return rope.theta
    # slowest = base^(−(size − 2) / size), solved for the base.
    slowest = rope.frequencies(rotary_size)[-1]
    return slowest ** (-rotary_size / (rotary_size - 2))


def _base(tables: Mapping[str, Mapping[str, Any]], default: float) -> float:
    """Return the rotary base; raise ConfigError if two tables name different ones."""
    found = {}
    for where, table in tables.items():
        if table.get("rope_theta") is not None:
            value = table["rope_theta"]
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ConfigError(f"rope_theta={shown(value)} ({where}) in config.json must be a positive number.")
            found[where] = float(value)
    if len(set(found.values())) > 1:
        raise ConfigError(f"config.json contradicts itself: rope_theta is {found}. Keep one of them.")
    return next(iter(found.values()), default)


def _common_rope(found: dict[str, Rope]) -> Rope:
    """Return the rope that all tables share; raise ConfigError if two differ."""
    first, *others = found.values()
    if any(other != first for other in others):
        raise ConfigError(f"config.json contradicts itself: {found}. Keep one of them.")
    return first


def _kind(where: str, table: Mapping[str, Any]) -> str:
    """Return the table's rope kind; raise ConfigError if this decoder does not support it."""
    named = {table[key] for key in ("rope_type", "type") if key in table}
    kind = next(iter(named), "default")
    if len(named) > 1 or kind not in _KEYS:
        raise ConfigError(f"{where}={shown(dict(table))} is not supported; supported rope_types: {sorted(_KEYS)}.")
    return kind


def _nested(parameters: Any) -> Mapping[str, Any]:
    """Return Gemma 3's ``rope_parameters``: one table per layer kind."""
    if parameters is None:
        return {}
    if not isinstance(parameters, dict) or set(parameters) - {FULL, WINDOW}:
        raise ConfigError(
            f"rope_parameters={shown(parameters)} is not supported; supported: tables {FULL} and {WINDOW}."
        )
    return parameters


def _table(where: str, value: Any) -> Mapping[str, Any]:
    """Return a table of rope settings; raise ConfigError for any other value."""
    if not isinstance(value, dict):
        raise ConfigError(
            f"{where}={shown(value)} is not supported by this decoder; supported: a table with rope_type."
        )
    return value


def _with_original(hf: HfConfig, table: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the table with the original length from config.json's top level, if that has one."""
    if _ORIGINAL not in hf:
        return table
    if table.get(_ORIGINAL, hf[_ORIGINAL]) != hf[_ORIGINAL]:
        raise ConfigError(
            f"config.json contradicts itself: {_ORIGINAL} is {hf[_ORIGINAL]}, but also {table[_ORIGINAL]}."
        )
    return {**table, _ORIGINAL: hf[_ORIGINAL]}


def _has_scaling(hf: HfConfig) -> bool:
    """Return True if a table in config.json names a rope other than the default."""
    tables = [_table(where, hf[where]) for where in _TABLE_KEYS if hf.get(where)]
    return any(_kind("rope", table) != "default" for table in tables)


def _without_original(hf: HfConfig) -> HfConfig:
    """Return config.json without the original length, in its tables too."""
    found = {key: value for key, value in hf.items() if key != _ORIGINAL}
    for where in _TABLE_KEYS:
        if isinstance(hf.get(where), Mapping):
            found[where] = {key: value for key, value in hf[where].items() if key != _ORIGINAL}
    return found


def _with_partial(written: dict[str, Any], partial: float) -> dict[str, Any]:
    """Return the written keys with the rotary share: next to the table for transformers 4, in it for 5."""
    tables = {where: {**written[where], _PARTIAL: partial} for where in _TABLE_KEYS if written.get(where)}
    return {**written, **tables, _PARTIAL: partial}


def _check_partial(where: str, table: Mapping[str, Any]) -> None:
    """Raise ConfigError for rotary positions on only some channels, which these families do not support."""
    if table.get("partial_rotary_factor", 1.0) not in (1.0, None):
        partial = table["partial_rotary_factor"]
        raise ConfigError(f"partial_rotary_factor={shown(partial)} ({where}) is not supported here; supported: 1.0.")


def _number(where: str, table: Mapping[str, Any], key: str) -> float:
    """Return a key's number; raise ConfigError for any other value."""
    return typed(f"{where}: {key}", table.get(key), "float")


def _numbers(where: str, table: Mapping[str, Any], key: str) -> tuple[float, ...]:
    """Return a key's list of numbers; raise ConfigError for any other value."""
    numbers = typed(f"{where}: {key}", table.get(key), "list")
    return tuple(typed(f"{where}: an entry of {key}", number, "float") for number in numbers)
