"""Help for a run's settings: choices, default and meaning per key, for all sections or for one."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from itertools import pairwise
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from launcher.config.config_sections import NO_PRESET, RunConfig
from launcher.recipes.find import recipe_summary, recipes
from launcher.wording import did_you_mean
from longctx.architecture.mixers.layer_kinds import MIXERS
from longctx.architecture.model_rules import CHOICES
from longctx.architecture.rope import ROPE_KINDS
from longctx.config import PRESETS
from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_selection import KERNELS
from parallel.layout.layout_choice import AUTO
from parallel.layout.sequence import KINDS

_START = "longctx train"
_USAGE = f"""\
usage: {_START} [--ranks N | --hostfile H] [--config FILE|RECIPE] [--SECTION.KEY VALUE …]

Train a model. Flags override the TOML file or recipe, and it overrides the defaults.
Every key also works in a TOML file: `--train.lr 3e-4` is `lr = 3e-4` under [train].
Defaults below come from --config (without it, from the recipe quickstart)."""
_FLAGS = """\
other flags:
  --config FILE|RECIPE      a TOML file, or a recipe by its name
  --print-config            print all settings as TOML, and exit
  --print-schema            print the TOML file's JSON schema, for editors, and exit
  --help all|SECTION|KEY    all settings, a section's, or one: --help model, --help train.lr"""
_FIRST = (
    "data.train",
    "run.output_dir",
    "run.start_from",
    "run.resume",
    "data.seq_len",
    "train.steps",
    "train.lr",
    "train.tokens_per_step",
    "parallel.context",
    "model.preset",
)
"""Keys that most runs set."""
_EXAMPLES = {
    "": (
        f"{_START} --config quickstart",
        f"{_START} --config quickstart --train.lr 3e-3 --run.output_dir runs/second",
        f"{_START} --config llama-3.1-8b-128k --print-config",
    ),
    "run": (f"{_START} --config run.toml --run.output_dir runs/second --run.resume latest",),
    "model": (
        f"{_START} --model.preset quickstart-dense --model.num_layers 8",
        f"{_START} --config run.toml --model.rope.kind linear --model.rope.factor 4",
    ),
    "data": (f"{_START} --config run.toml --data.train runs/long-data --data.seq_len 131072",),
    "train": (f"{_START} --config run.toml --train.lr 2e-5 --train.steps 400 --train.keep attention",),
    "preference": (f"{_START} --config run.toml --train.objective preferences --preference.loss dpo",),
    "parallel": (f"{_START} --ranks 8 --config run.toml --parallel.context 8 --parallel.ulysses 2",),
    "zero": (f"{_START} --config run.toml --zero.stage 3",),
    "checkpoint": (f"{_START} --config run.toml --checkpoint.every_steps 50 --checkpoint.keep_last 4",),
    "validation": (f"{_START} --config run.toml --validation.every_steps 50 --validation.rows 64",),
}
"""Example command lines per section; those under "" are for the full help."""

CHOICES_OF: Mapping[str, Sequence[Any]] = {
    "model.preset": (NO_PRESET, *PRESETS),
    "model.layers": tuple(MIXERS),
    "model.rope.kind": ROPE_KINDS,
    "parallel.layout": (AUTO, *KINDS),
    "parallel.kernel": ("auto", *KERNELS),
    "zero.stage": ("auto", 0, 1, 2, 3),
} | {f"model.{name}": choices for name, choices in CHOICES.items()}
"""Choices for keys whose type does not list them."""


class SettingHelp(NamedTuple):
    """A setting as shown in the help."""

    name: str
    """Key with its section."""
    values: str
    """Choices or type."""
    default: str
    """Value in the recipe."""
    description: str


def help_text(config: RunConfig, section_or_key: str = "") -> str:
    """Return help for all keys, or for the section or key ``section_or_key``. Raise ConfigError if it does not exist.

    Defaults are the values in ``config``.
    """
    if section_or_key == "all":
        section_or_key = ""
    parts, known = [], []
    for f in dataclasses.fields(RunConfig):
        section = getattr(config, f.name)
        keys = list(keys_of(section, f.name))
        known.append(f.name)
        known.extend(key.name for key in keys)
        shown = [
            _paragraph(key) for key in keys if not section_or_key or f"{key.name}.".startswith(f"{section_or_key}.")
        ]
        if shown:
            parts.append(_block(f"[{f.name}]  {inspect.getdoc(type(section))}", shown))
    if not parts:
        sections = ", ".join(f.name for f in dataclasses.fields(RunConfig))
        raise ConfigError(
            f"--help {section_or_key}: no such section or key.{did_you_mean(section_or_key, known)}\n"
            f"The sections are {sections}."
        )
    if not section_or_key:
        # A terminal shows the end of a long text, so the pointers to more help come last.
        parts = [_USAGE, *parts, _list_recipes(), _FLAGS]
    parts.append(_block("examples:", [f"  {line}" for line in _EXAMPLES[section_or_key.partition(".")[0]]]))
    return "\n\n".join(parts)


def first_settings(config: RunConfig) -> str:
    """Return help for the keys that most runs set, and for the flags that are no settings."""
    keys = {key.name: key for f in dataclasses.fields(RunConfig) for key in keys_of(getattr(config, f.name), f.name)}
    shown = [_paragraph(keys[name]) for name in _FIRST]
    return "\n\n".join([_block("settings that most runs set:", shown), _FLAGS])


def _block(header: str, lines: Sequence[str]) -> str:
    return "\n".join([header, "\n".join(lines)])


def _list_recipes() -> str:
    found = recipes()
    width = max(len(name) for name in found)
    return _block(
        "recipes (--config NAME):", [f"  {name:{width}}  {recipe_summary(path)}" for name, path in found.items()]
    )


def _paragraph(key: SettingHelp) -> str:
    width = min(shutil.get_terminal_size().columns, 120)
    description = textwrap.fill(key.description, width, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return f"  --{key.name} {key.values}  (default: {key.default})\n{description}"


def keys_of(section: Any, prefix: str) -> Iterator[SettingHelp]:
    """Yield a section's keys, including those in nested tables."""
    types, meanings = get_type_hints(type(section)), meanings_of(type(section))
    for f in dataclasses.fields(section):
        name, value = f"{prefix}.{f.name}", getattr(section, f.name)
        if dataclasses.is_dataclass(value):
            yield from keys_of(value, name)
        else:
            yield SettingHelp(name, _values(name, types[f.name]), _format_value(value), meanings[f.name])


def _values(name: str, kind: Any) -> str:
    """Return a key's choices or its type; for a list, those of its entries."""
    entries = ""
    if get_origin(kind) is tuple:
        kind, entries = get_args(kind)[0], " …"
    choices = CHOICES_OF.get(name, ())
    if get_origin(kind) is Literal:
        choices = get_args(kind)
    elif kind is bool:
        choices = ("true", "false")
    if choices:
        return "{" + ",".join(str(choice) for choice in choices) + "}" + entries
    # A number, or a word such as "auto".
    if get_args(kind):
        return "{" + ",".join(_values(name, part) for part in get_args(kind)).replace("{", "").replace("}", "") + "}"
    return {int: "INTEGER", float: "NUMBER", str: "TEXT"}[kind] + entries


def _format_value(value: Any) -> str:
    """Format a value as on the command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return " ".join(_format_value(entry) for entry in value) or "none"
    if value == "":
        return "empty"
    return str(value)


@cache
def meanings_of(section: type) -> dict[str, str]:
    """Return the text below each dataclass field, on one line, including inherited fields."""
    found: dict[str, str] = {}
    for part in section.__mro__:
        if not dataclasses.is_dataclass(part):
            continue
        # Python discards a string below a field, so it is read from the source. A subclass comes first in the MRO, so
        # its text takes precedence.
        tree = ast.parse(inspect.getsource(part)).body[0]
        assert isinstance(tree, ast.ClassDef)
        for statement, below in pairwise(tree.body):
            match statement, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    found.setdefault(name, " ".join(text.split()))
    return found
