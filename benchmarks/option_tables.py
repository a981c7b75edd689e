"""The tables of options and settings of docs/, made from each verb's ``--help`` and from a run's config.

``python -m benchmarks.tables`` replaces what stands between a mark, ``<!-- options: VERB -->`` or
``<!-- settings: SECTION -->``, and ``<!-- end -->``.
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
"""Of a flag the default says nothing that its name does not."""


def rewritten(text: str) -> str:
    """Return a page with its tables made anew. KeyError for a verb or a section that there is none of."""
    text = _MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}", text)
    return _SETTINGS.sub(lambda found: f"{found[1]}\n{settings_table(found[2])}\n\n{found[3]}", text)


def settings_table(section: str) -> str:
    """Return the keys of a section of a run's config as Markdown: name, values, default, meaning."""
    lines = ["| key | values | default | |", "|---|---|---|---|"]
    for key in keys_of(getattr(RunConfig(), section), section):
        cells = (cell.replace("|", "\\|") for cell in (key.name, key.values, key.default, key.description))
        lines.append("| `{}` | `{}` | `{}` | {} |".format(*cells))
    return "\n".join(lines)


def table(verb: str) -> str:
    """Return the options of a verb as Markdown: name and value, default, meaning."""
    lines = ["| option | default | |", "|---|---|---|"]
    for names, text in options(help_of(verb)):
        meaning, default = text, ""
        if found := _DEFAULT.search(text):
            meaning = text[: found.start()]
            # A long list is broken behind a comma, where it has no space.
            default = found[2] or found[3] or found[1].replace(", ", ",")
        if default not in ("required", "repeatable"):
            default = f"`{default}`" if default not in _NO_DEFAULTS else ""
        name, meaning, default = (cell.replace("|", "\\|") for cell in (names, meaning, default))
        lines.append(f"| `{name}` | {default} | {meaning} |")
    return "\n".join(lines)


def help_of(verb: str) -> str:
    """Return what ``longctx VERB --help`` prints on a terminal that has no room for two boxes side by side."""
    # By its encoding tyro chooses the frame of each box, and without one spaces.
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
    """Return each option of a help text with its meaning, but ``--help``.

    An option begins at the left of its box; its meaning follows two spaces, or on the lines below, further in.
    """
    found: list[tuple[str, str]] = []
    heads: set[str] = set()
    boxed = [line[2:-1].rstrip() for line in text.splitlines() if line.startswith("│")]
    for number, line in enumerate(boxed):
        if not line or set(line) == {"─"}:
            continue
        # A box may say first what its options are about.
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
