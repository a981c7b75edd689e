"""Tables of options and settings in docs/, made from each verb's ``--help`` and from a training run's config.

``python -m benchmarks.tables`` replaces the text between a mark, ``<!-- options: VERB -->`` or ``<!-- settings: SECTION
-->``, and ``<!-- end -->``.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
from unittest.mock import patch

from launcher.cli.cli_commands import parse
from launcher.config.config_sections import RunConfig
from launcher.config.help import keys_of

_SETTINGS = re.compile(r"(<!-- settings: ([a-z]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_MARKED = re.compile(r"(<!-- options: ([a-z ]+) -->\n).*?(<!-- end -->)", re.DOTALL)
_DEFAULT = re.compile(r" ?\((?:default: (.*)|(required)|(repeatable))\)$")
_NO_DEFAULTS = ("None", "False", "True", "", "''")
"""Defaults that add nothing to a flag's name."""


def rewritten(text: str) -> str:
    """Return a page with new tables. KeyError for an unknown verb or section."""
    text = _MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", text)
    return _SETTINGS.sub(lambda found: f"{found[1]}\n{settings_table(found[2])}\n\n{found[3]}", text)


def settings_table(section: str) -> str:
    """Return the keys in a section of a training run's config as Markdown: name, values, default, meaning."""
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for key in keys_of(getattr(RunConfig(), section), section):
        cells = (cell.replace("|", "\\|") for cell in (key.name, key.values, key.default, key.description))
        lines.append("| `{}` | `{}` | `{}` | {} |".format(*cells))
    return "\n".join(lines)


def table(verb: str) -> str:
    """Return a verb's options as Markdown: name and value, default, meaning."""
    lines = ["| option | default | |", "|---|---|---|"]
    for names, text in options(help_of(verb)):
        meaning, default = text, ""
        if found := _DEFAULT.search(text):
            meaning = text[: found.start()]
            # A long list is broken after a comma, because it has no space.
            default = found[2] or found[3] or found[1].replace(", ", ",")
        if default not in ("required", "repeatable"):
            default = f"`{default}`" if default not in _NO_DEFAULTS else ""
        name, meaning, default = (cell.replace("|", "\\|") for cell in (names, meaning, default))
        lines.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(lines)


def help_of(verb: str) -> str:
    """Return the output of ``longctx VERB --help`` on a terminal too narrow for two boxes side by side."""
    # tyro chooses each box's frame by encoding, and spaces without one.
    printed = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    with (
        patch.dict(os.environ, {"COLUMNS": "120", "NO_COLOR": "1"}),
        contextlib.redirect_stdout(printed),
        contextlib.suppress(SystemExit),
    ):
        parse([*verb.split(), "--help"])
    printed.seek(0)
    return printed.read()


def options(text: str) -> list[tuple[str, str]]:
    """Return each option in a help text with its meaning, except ``--help``.

    An option begins at its box's left edge; its meaning follows two spaces, or on the lines below, further in.
    """
    found: list[tuple[str, str]] = []
    heads: set[str] = set()
    boxed = [line[2:-1].rstrip() for line in text.splitlines() if line.startswith("│")]
    for number, line in enumerate(boxed):
        if not line or set(line) == {"─"}:
            continue
        # A box may begin with a description of its options.
        if number + 1 < len(boxed) and set(boxed[number + 1].strip()) == {"─"}:
            heads.add(line)
            continue
        if line.startswith("  "):
            names, meaning = found[-1]
            found[-1] = names, f"{meaning} {line.strip()}".strip()
        else:
            names, _, meaning = line.strip().partition("  ")
            found.append((names, meaning.strip()))
    return [(names, meaning) for names, meaning in found if names != "-h, --help"]
