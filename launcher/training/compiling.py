"""``train.compile``: the compiler of blocks, and what the log says of compiling."""

from __future__ import annotations

import logging

from launcher.config.resolved import ResolvedConfig
from longctx.kernels.regions import CompileCount, compile_count

log = logging.getLogger(__name__)


def compiler_of(config: ResolvedConfig) -> str | None:
    """``Execution.compiler`` of a config."""
    if config.train.compile == "on":
        return "inductor"
    return None


class CompileWatch:
    """Says in the log when a step has compiled anything, so that a slow step has its reason beside it."""

    def __init__(self, *, is_on: bool) -> None:
        """``is_on`` is False where nothing is compiled, or where another rank says it."""
        self._is_on = is_on
        self._before = CompileCount(0, 0.0)

    def report(self, step: int) -> None:
        """Log what was compiled since the last call."""
        if not self._is_on:
            return
        now = compile_count()
        graphs, seconds = now.graphs - self._before.graphs, now.seconds - self._before.seconds
        if graphs:
            log.info("Compiling %d graphs took %.1f s of step %d.", graphs, seconds, step)
        self._before = now
