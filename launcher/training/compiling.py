"""``train.compile``: the compiler of blocks, and what the log says of compiling."""

from __future__ import annotations

import logging

from launcher.config.resolved import ResolvedConfig

log = logging.getLogger(__name__)


def compiler_of(config: ResolvedConfig) -> str | None:
    """``Execution.compiler`` of a config."""
    if config.train.compile == "on":
        return "inductor"
    return None
