"""The ``--probe`` flag for ``verify``."""

from __future__ import annotations

from collections.abc import Sequence

from longctx.errors import ConfigError


def without_probe(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Return the run's settings, and True if ``--probe leak`` is among the arguments."""
    rest = [word for word in argv if not word.startswith("--probe")]
    given = " ".join(argv).replace("--probe=", "--probe ")
    if len(rest) == len(argv):
        return list(argv), False
    if "--probe leak" not in given:
        raise ConfigError("--probe needs a value, and leak is the only one: --probe leak.")
    return [word for word in rest if word != "leak"], True
