"""Runs that are disturbed from outside: who of them gets which signal, and what is left."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from launcher.metrics.record import Record, read_metrics
from launcher.supervise.progress import last_event, last_step, newest_checkpoint_step
from tests.launcher.runs import Ended, Launch, flags

STEPS = 40
"""More than a run takes until it is disturbed, and few enough to be taken once more."""
LONG = {"train.steps": STEPS, "checkpoint.every_steps": 0, "validation.every_steps": 25}
SECONDS = 60.0
"""From the signal to the end of all. It takes one or two; a machine that others use takes longer."""


@dataclass(frozen=True)
class Disturbed:
    """How a run ended that was disturbed."""

    ended: Ended
    seconds: float
    """From the signal to the end of the last process."""
    taken: int
    """Steps that it has recorded."""
    saved: int | None
    """Step of its newest checkpoint."""
    stop: Record | None
    """The event of the stop."""


def disturbed(
    shards: Path,
    folder: Path,
    act: Callable[[Launch], None],
    changed: Mapping[str, Any] | None = None,
    *,
    after_step: int = 3,
    **options: Any,
) -> Disturbed:
    """Start a run, act once it has taken a few steps, and wait for the end of all its processes."""
    launch = Launch(flags(shards, folder, {**LONG, **(changed or {})}), **options)
    launch.wait_until(lambda: (last_step(folder) or 0) >= after_step, timeout=SECONDS * 2)
    family = launch.family()
    began = time.monotonic()
    act(launch)
    ended = launch.wait(SECONDS * 2)
    _, alive = psutil.wait_procs(family, timeout=SECONDS)
    seconds = time.monotonic() - began
    assert not alive, [process.cmdline() for process in alive]
    steps = [record["step"] for record in read_metrics(folder) if record["kind"] == "train"]
    return Disturbed(ended, seconds, steps[-1], newest_checkpoint_step(folder), last_event(folder))


def send(number: signal.Signals, whom: str) -> Callable[[Launch], None]:
    """Send a signal to one process: a ``rank_N``, the ``launcher`` or the ``runner``."""

    def act(launch: Launch) -> None:
        if whom.startswith("rank"):
            launch.ranks()[int(whom[-1])].send_signal(number)
        elif whom == "launcher":
            launch.launchers()[-1].send_signal(number)
        else:
            launch.runner().send_signal(number)

    return act
