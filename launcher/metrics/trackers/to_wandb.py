"""Weights & Biases (wandb): the only file that imports it."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from launcher.metrics.trackers.start import Start

log = logging.getLogger(__name__)

NAME = "wandb"
_INIT_SECONDS = 60


def open_tracker(start: Start) -> WandbRun:
    """Go on with the run's W&B run, or make one; offline where no key is set or nobody answers."""
    known = start.remembered(NAME)
    run_id = str(known.get("id") or secrets.token_hex(4))
    began = known.get("began")
    if not isinstance(began, int | float):
        began = time.time()
    # Before anything is sent: an attempt that is killed now must find it.
    start.remember(NAME, {"id": run_id, "project": start.project, "began": began})
    options: dict[str, Any] = {
        "project": start.project,
        "name": start.name,
        "id": run_id,
        "resume": "allow",
        "dir": str(start.folder),
        "config": dict(start.config),
        # The run's own log is in its folder; this process has nothing to show.
        "settings": wandb.Settings(console="off", init_timeout=_INIT_SECONDS),
    }
    try:
        run = wandb.init(**options)
    except Exception as error:
        # Who has chosen a mode gets that, or nothing.
        if os.environ.get("WANDB_MODE"):
            raise
        what = type(error).__name__
        log.warning("No W&B online (%s): the run is kept in its folder. Send it later by `wandb sync`.", what)
        run = wandb.init(**options, mode="offline")
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return WandbRun(run, began)


class WandbRun:
    """Writes to one run of W&B, whose first attempt began at this time, in seconds since 1970."""

    def __init__(self, run: Any, began: float) -> None:
        self._run, self._began, self._row = run, began, 0

    def metrics(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log one row of its history."""
        # W&B refuses rows whose number goes back. Steps do, where a resumed run takes them again, and each attempt
        # that was kept offline would count from 0: milliseconds of the run never do.
        self._row = max(self._row + 1, round(1000 * (time.time() - self._began)))
        self._run.log({"step": step, **values}, step=self._row)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a table of one cell: W&B keeps each step's."""
        table = wandb.Table(columns=["step", "text"], data=[[step, text]])
        self._row += 1
        self._run.log({"step": step, name: table}, step=self._row)

    def finish(self, how: str) -> None:
        """Upload what is left; W&B shows a run that has not come to its end as failed."""
        exit_code = 1
        if how in ("done", "stopped"):
            exit_code = 0
        self._run.finish(exit_code=exit_code)
