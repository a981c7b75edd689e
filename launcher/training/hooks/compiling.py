"""Compilation log, which explains slow steps."""

from __future__ import annotations

import logging

from launcher.metrics.record import Record
from launcher.training.hook import RunningStep, StepHook
from longctx.kernels.regions import CompileCount, compile_count

log = logging.getLogger(__name__)


class CompileWatch(StepHook):
    """Hook that logs compilation, on one rank."""

    def __init__(self) -> None:
        self._before = CompileCount(0, 0.0)

    def before_log(self, step: RunningStep, record: Record) -> None:
        """Log graphs compiled since the last call."""
        # The counter covers the process, so log the difference.
        now = compile_count()
        graphs, seconds = now.graphs - self._before.graphs, now.seconds - self._before.seconds
        if graphs:
            log.info("Compiling %d graphs took %.1f s of step %d.", graphs, seconds, step.number)
        self._before = now
