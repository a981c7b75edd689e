"""Command line flags that are read before the settings."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from longctx.errors import ConfigError
from longctx.untrusted.terminal import for_terminal


def without_local_rank(argv: Sequence[str]) -> list[str]:
    """Return the arguments without --local_rank, which deepspeed's launcher adds and no script reads."""
    return [argument for argument in argv if not argument.startswith("--local_rank")]


def take_flag(argv: list[str], name: str) -> tuple[list[str], str | None]:
    """Remove ``name VALUE`` or ``name=VALUE``; return the rest and the value. Dashes count as underscores."""
    # Repeated flags are all removed; the last value wins, as in argparse.
    rest, value, at = [], None, 0
    while at < len(argv):
        if not argv[at].startswith("--") or key_of_flag(argv[at]) != key_of_flag(name):
            rest.append(argv[at])
            at += 1
        elif "=" in argv[at]:
            value, at = argv[at].split("=", 1)[1], at + 1
        elif at + 1 == len(argv):
            raise ConfigError(f"{name} needs a value.")
        else:
            value, at = argv[at + 1], at + 2
    return rest, value


def key_of_flag(argument: str) -> str:
    """Return a flag's key; dashes become underscores."""
    return argument.removeprefix("--").split("=", 1)[0].replace("-", "_")


def requested_help(argv: list[str]) -> str | None:
    """Return the section or key after ``--help``: empty for all settings, None without ``--help``."""
    for at, argument in enumerate(argv):
        if argument in ("-h", "--help"):
            next_arguments = argv[at + 1 : at + 2]
            if next_arguments and not next_arguments[0].startswith("-"):
                return next_arguments[0]
            return ""
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
    return None


def end_with(text: str, *, quiet: bool) -> NoReturn:
    """Print a result, unless ``quiet`` on ranks other than 0, and exit successfully."""
    if not quiet:
        try:
            sys.stdout.write(for_terminal(f"{text}\n", sys.stdout))
            sys.stdout.flush()
        except BrokenPipeError:
            # `--help | head`: Python would fail again when it closes the stream at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise SystemExit(0)
