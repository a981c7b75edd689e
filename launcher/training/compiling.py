"""``train.compile``: the compiler of blocks."""

from __future__ import annotations

from launcher.config.resolved import ResolvedConfig


def compiler_of(config: ResolvedConfig) -> str | None:
    """``Execution.compiler`` of a config."""
    if config.train.compile == "on":
        return "inductor"
    return None
