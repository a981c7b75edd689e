"""Load a run's config strictly: defaults, then a TOML file, then flags."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import tyro
from pydantic import TypeAdapter, ValidationError

from launcher.config.config_sections import RunConfig
from launcher.config.flags import end_with, key_of_flag, requested_help, take_flag, without_local_rank
from launcher.config.model_section import find_base, lay_over, resolve_model
from launcher.config.unsupported_keys import reject_unsupported_keys
from launcher.recipes.find import QUICKSTART, find_config
from launcher.wording import did_you_mean
from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.files import read_toml


# Precedence, lowest first: defaults, the base model from a preset or a checkpoint, the file, flags. The base model must
# be known before the file's [model] fields are laid over it, and flags may select it. These few flags are therefore
# read before the file is merged, and all others afterwards by tyro.
def load_run_config(argv: list[str], *, quiet: bool = False) -> RunConfig:
    """Parse a command line into the run's config; without ``--config``, the quickstart recipe is the file.

    Fields in ``[model]`` override the model of the checkpoint that the run starts or resumes from, unless a preset is
    named. A run that starts from a checkpoint has no default file.

    Raise ConfigError for an unreadable file, an unknown key or a value of the wrong type. An unknown flag, ``--help``,
    ``--print-config`` and ``--print-schema`` end the process through SystemExit; ``quiet`` suppresses output on ranks
    other than 0.
    """
    argv = without_local_rank(argv)
    argv, path = take_flag(argv, "--config")
    argv, values = _file_and_early_flags(argv, path)
    flags = {key_of_flag(argument) for argument in argv if argument.startswith("--")}
    # Before the parser, which would only report that they are unknown.
    reject_unsupported_keys(flags, known_keys())
    help_key = requested_help(argv)
    if help_key is not None:
        # Deferred because it is slow. Help must also work before any checkpoint exists.
        from launcher.config.help import help_text

        end_with(help_text(config_from_values(values), help_key), quiet=quiet)
    if "--print-schema" in argv:
        from launcher.config.config_schema import schema_text

        end_with(schema_text(_adapter()), quiet=quiet)
    prints = "--print-config" in argv
    argv = [argument for argument in argv if argument != "--print-config"]
    named = _named_keys(values) | flags
    # Read early: the model in a Hugging Face folder depends on this flag.
    weight = take_flag(argv, "--train.mtp_weight")[1] or values.get("train", {}).get("mtp_weight", 0)
    base = find_base(values, use_mtp=str(weight) not in ("0", "0.0"))
    config = resolve_model(_with_flags(config_from_values(values, base), argv, quiet=quiet), base, named)
    if prints:
        end_with(config.to_toml().rstrip(), quiet=quiet)
    return config


def _with_flags(defaults: RunConfig, argv: list[str], *, quiet: bool) -> RunConfig:
    """Return the config with the flags applied. For an invalid flag, print the error and raise SystemExit."""
    with contextlib.ExitStack() as stack:
        if quiet:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        return tyro.cli(
            RunConfig,
            # TOML booleans work on the command line too.
            args=[{"true": "True", "false": "False"}.get(argument, argument) for argument in argv],
            default=defaults,
            prog="longctx train",
            use_underscores=True,
            add_help=False,
            config=(tyro.conf.FlagConversionOff,),
        )


_EARLY_FLAGS = ("model.preset", "run.start_from", "run.resume", "run.output_dir")
"""Keys that determine the base model under the fields in [model], so they are read before other flags."""


def _file_and_early_flags(argv: list[str], path: str | None) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments without the early flags, and the file's values overridden by these flags."""
    early: dict[str, str] = {}
    for key in _EARLY_FLAGS:
        argv, value = take_flag(argv, f"--{key}")
        if value is not None:
            early[key] = value
    if path is not None:
        file = find_config(path)
        values = read_toml(file, f"--config {file}")
    elif early.get("run.start_from", "no") != "no":
        # The quickstart's model and rates are for a new toy model.
        file, values = None, {}
    else:
        file, values = QUICKSTART, read_toml(QUICKSTART, str(QUICKSTART))
    _check_keys(values)
    # They do not suit another preset either, even if the recipe was requested by name.
    if file == QUICKSTART and not early.get("model.preset", QUICKSTART.stem).startswith(QUICKSTART.stem):
        for key in ("optimizer", "lr"):
            del values["train"][key]
    for key, value in early.items():
        section, name = key.split(".")
        values.setdefault(section, {})[name] = value
    return argv, values


def _named_keys(values: dict[str, Any]) -> set[str]:
    return {f"{section}.{key}" for section, entries in values.items() if isinstance(entries, dict) for key in entries}


def config_from_values(values: dict[str, Any], base: ModelConfig | None = None) -> RunConfig:
    """Build a config from nested plain values. Raise ConfigError, with a dotted path, for unknown keys and wrong types.

    Without a preset, the given model fields override those in ``base``, or a plain decoder's.
    """
    _check_keys(values)
    values = {**values, "model": lay_over(values.get("model", {}), base)}
    try:
        # JSON's strict mode accepts tables as dataclasses and integers as floats, and allows no other conversion.
        return _adapter().validate_json(json.dumps(values, default=_reject_timestamp), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where, hint = ".".join(str(p) for p in first["loc"]), ""
        if isinstance(first["input"], str) and first["type"] in ("float_type", "int_type", "bool_type"):
            hint = " Write it without quotes."
        raise ConfigError(f"{where}={first['input']!r}: {first['msg']}.{hint}") from error


@cache
def _adapter() -> TypeAdapter[RunConfig]:
    # Building it takes longer than validating with it.
    return TypeAdapter(RunConfig)


def _reject_timestamp(value: Any) -> None:
    """Raise ConfigError for a value that TOML has and JSON lacks: a date or a time."""
    raise ConfigError(f"{value} is a date or a time, and no key accepts one. Put text in quotes.")


def _check_keys(values: dict[str, Any]) -> None:
    """Raise ConfigError, with the nearest known name, for an unknown section or key."""
    known = known_keys()
    reject_unsupported_keys([*values, *_named_keys(values)], known)
    if not all(isinstance(v, dict) for v in values.values()):
        loose = sorted(k for k, v in values.items() if not isinstance(v, dict))
        of = [key.rpartition(".")[0] for key in known if key.rpartition(".")[2] == loose[0]] or ["train", "data"]
        raise ConfigError(
            f"{loose[0]!r} is outside a section. Every key belongs to one: write it under "
            f"{' or '.join(f'[{section}]' for section in of)}."
        )
    # Not pydantic's `extra="forbid"`, which suggests no alternative.
    sections = _sections()
    for section, entries in values.items():
        if section not in sections:
            raise ConfigError(f"section [{section}] is unknown.{did_you_mean(section, list(sections))}")
        for key in _dotted(entries, sections[section]):
            if key not in sections[section]:
                raise ConfigError(f"key {section}.{key} is unknown.{did_you_mean(f'{section}.{key}', known)}")


@cache
def _sections() -> dict[str, list[str]]:
    """Return the keys per section."""
    return {f.name: _keys(f.default_factory()) for f in dataclasses.fields(RunConfig)}  # type: ignore[misc]


def known_keys() -> list[str]:
    """Return all keys with their sections."""
    return [f"{section}.{key}" for section, keys in _sections().items() for key in keys]


def _keys(section: Any, prefix: str = "") -> list[str]:
    """Return a section's keys; for a nested table, its name and its keys prefixed with the name."""
    names = []
    for f in dataclasses.fields(section):
        names.append(prefix + f.name)
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            names += _keys(value, f"{f.name}.")
    return names


def _dotted(entries: dict[str, Any], known: list[str]) -> list[str]:
    """Return the given keys; those in a nested table are prefixed with its name."""
    found = []
    for key, value in entries.items():
        # A table in place of a plain value stays one key: its type is rejected later, with its name.
        if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in known):
            found += [f"{key}.{name}" for name in value]
        else:
            found.append(key)
    return found
