"""``train.compile``: what auto comes to on these ranks, and what the log says of compiling."""

from __future__ import annotations

import dataclasses
import logging

import torch

from launcher.config.sections import RunConfig
from longctx.errors import ConfigError
from longctx.kernels.regions import CompileCount, compile_count, missing_for_compiling
from parallel.runtime.process import gather_objects

log = logging.getLogger(__name__)


def settle_compile(config: RunConfig, device: torch.device) -> RunConfig:
    """The config with ``train.compile`` on or off; the log says why. Collective.

    ConfigError on every rank alike where it is on and any rank's machine cannot compile.
    """
    wish = config.train.compile
    if wish == "off" or (wish == "auto" and device.type == "cpu"):
        return _settled(config, "off")
    problems = gather_objects(missing_for_compiling(device.type))
    failing = [(rank, problem) for rank, problem in enumerate(problems) if problem]
    if not failing:
        log.info(
            "Blocks are compiled (train.compile=%s): the first step takes longer, and longer still where the cache of "
            "compiled code is empty.",
            wish,
        )
        return _settled(config, "on")
    rank, problem = failing[0]
    if wish == "on":
        raise ConfigError(
            f"train.compile=on, but on rank {rank} {problem}.\nInstall it there, or set train.compile=off."
        )
    log.warning("train.compile=auto is off, for on rank %d %s. Steps take longer than they could.", rank, problem)
    return _settled(config, "off")


def compiler_of(config: RunConfig) -> str | None:
    """``Execution.compiler`` of a config whose ``train.compile`` is settled."""
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


def _settled(config: RunConfig, compile: str) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, compile=compile))
