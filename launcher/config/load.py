"""Load a run's config: defaults, then a TOML file, then flags; strict."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
import tomllib
from pathlib import Path
from typing import Any, NoReturn

import tyro
from pydantic import TypeAdapter, ValidationError

from launcher.config.sections import RunConfig, expand_preset
from launcher.recipes.find import QUICKSTART, find_config
from launcher.wording import did_you_mean
from longctx.errors import ConfigError


def load_run_config(argv: list[str], *, quiet: bool = False) -> RunConfig:
    """The run's config from the command line; without ``--config`` the quickstart recipe is the file.

    ConfigError for a file that cannot be read or holds an unknown key or a value of the wrong type. An unknown flag,
    ``--help`` and ``--print-config`` end the process through SystemExit; ``quiet`` keeps a rank from repeating what
    rank 0 prints.
    """
    # The deepspeed launcher adds --local_rank, which we do not need: each rank finds its device by itself.
    argv = [argument for argument in argv if not argument.startswith("--local_rank")]
    argv, path = _take_flag(argv, "--config")
    # The preset sets fields that the file and the other flags then change, so it is read before them.
    argv, preset = _take_flag(argv, "--model.preset")
    file = QUICKSTART
    if path is not None:
        file = find_config(path)
    values = read_toml(file)
    if preset is not None:
        values.setdefault("model", {})["preset"] = preset
    defaults = from_values(values)
    topic = _help_topic(argv)
    if topic is not None:
        # Its imports take time, which no run has to pay.
        from launcher.config.help import help_text

        _end_with(help_text(defaults, topic), quiet=quiet)
    prints = "--print-config" in argv
    config = _with_flags(defaults, [argument for argument in argv if argument != "--print-config"], quiet=quiet)
    if prints:
        _end_with(config.to_toml().rstrip(), quiet=quiet)
    return config


def _with_flags(defaults: RunConfig, argv: list[str], *, quiet: bool) -> RunConfig:
    """The config with what the flags say; SystemExit, once it is printed, for what is wrong with them."""
    with contextlib.ExitStack() as stack:
        if quiet:
            nowhere = stack.enter_context(Path(os.devnull).open("w"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        return tyro.cli(
            RunConfig,
            # TOML's spelling of booleans works on the command line too.
            args=[{"true": "True", "false": "False"}.get(argument, argument) for argument in argv],
            default=defaults,
            prog="pretrain.py",
            use_underscores=True,
            add_help=False,
            config=(tyro.conf.FlagConversionOff,),
        )


def _help_topic(argv: list[str]) -> str | None:
    """What ``--help`` asks about: a section or a key, empty for all of them; None where nobody asks."""
    for at, argument in enumerate(argv):
        if argument in ("-h", "--help"):
            following = argv[at + 1 : at + 2]
            if following and not following[0].startswith("-"):
                return following[0]
            return ""
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
    return None


def _end_with(text: str, *, quiet: bool) -> NoReturn:
    """Print a result, on rank 0 alone, and end well."""
    if not quiet:
        try:
            sys.stdout.write(f"{text}\n")
            sys.stdout.flush()
        except BrokenPipeError:
            # `--help | head`: Python would fail once more when it closes the stream at its end.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file's values; ConfigError when it is unreadable or malformed."""
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path} cannot be read: {error}.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"--config {path} is not TOML: {error}.") from error


def from_values(values: dict[str, Any]) -> RunConfig:
    """A config from nested plain values, strictly: unknown keys and wrong types are errors with a dotted path."""
    values = dict(values)
    if not all(isinstance(v, dict) for v in values.values()):
        loose = sorted(k for k, v in values.items() if not isinstance(v, dict))
        raise ConfigError(
            f"{loose[0]!r} stands outside a section. Every key belongs to one, such as [train] or [data]."
        )
    _refuse_unknown(values)
    values["model"] = expand_preset(values.get("model", {}))
    try:
        # JSON's strict mode takes tables for dataclasses and whole numbers for floats, and nothing else for another.
        return TypeAdapter(RunConfig).validate_json(json.dumps(values, default=_refuse_date), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(p) for p in first["loc"])
        raise ConfigError(f"{where}={first['input']!r}: {first['msg']}.") from error


def _refuse_date(value: Any) -> None:
    """Called for what TOML has and JSON has not."""
    raise ConfigError(f"{value} is a date or a time, and no key takes one. Put text in quotes.")


def _refuse_unknown(values: dict[str, dict[str, Any]]) -> None:
    """ConfigError, with the nearest known name, for a section or key that no dataclass has."""
    # Ours rather than pydantic's `extra="forbid"`: that one names no alternative.
    sections = {f.name: _keys(f.default_factory()) for f in dataclasses.fields(RunConfig)}  # type: ignore[misc]
    known = [f"{section}.{key}" for section, keys in sections.items() for key in keys]
    for section, entries in values.items():
        if section not in sections:
            raise ConfigError(f"section [{section}] is unknown.{did_you_mean(section, list(sections))}")
        for key in _dotted(entries, sections[section]):
            if key not in sections[section]:
                raise ConfigError(f"key {section}.{key} is unknown.{did_you_mean(f'{section}.{key}', known)}")


def _keys(section: Any, prefix: str = "") -> list[str]:
    """The keys of a section; those of a table within it with its name before them, and its name alone."""
    names = []
    for f in dataclasses.fields(section):
        names.append(prefix + f.name)
        value = getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            names += _keys(value, f"{f.name}.")
    return names


def _dotted(entries: dict[str, Any], known: list[str]) -> list[str]:
    """The keys that are given, those of a table within with its name before them."""
    found = []
    for key, value in entries.items():
        # A table where a plain value belongs stays one key: its type is refused later, by its name.
        if isinstance(value, dict) and any(name.startswith(f"{key}.") for name in known):
            found += [f"{key}.{name}" for name in value]
        else:
            found.append(key)
    return found


def _take_flag(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """The arguments without ``name VALUE`` or ``name=VALUE``, and the value."""
    rest, value, at = [], None, 0
    while at < len(argv):
        if argv[at] == name:
            if at + 1 == len(argv):
                raise ConfigError(f"{name} needs a value.")
            value, at = argv[at + 1], at + 2
        elif argv[at].startswith(f"{name}="):
            value, at = argv[at].split("=", 1)[1], at + 1
        else:
            rest.append(argv[at])
            at += 1
    return rest, value
