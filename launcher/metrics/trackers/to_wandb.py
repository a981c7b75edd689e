"""Weights & Biases (wandb) adapter, the only file that imports it."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Mapping
from typing import Any

import wandb  # pyright: ignore[reportMissingImports]

from launcher.metrics.trackers.tracker import TrackedRun, without_secrets

log = logging.getLogger(__name__)


class WandbTracker:
    """One W&B run, kept offline if there is no key or no server answers."""

    def __init__(self, run: TrackedRun) -> None:
        known = run.load_state("wandb")
        self._row, self._start_time = 0, float(known.get("began") or time.time())
        run_id = str(known.get("id") or secrets.token_hex(4))
        # Store the id before anything is sent: the next attempt finds it even after a kill.
        run.store_state("wandb", {"id": run_id, "project": run.project, "began": self._start_time})
        # Silent: it must never prompt for a key. Metadata would include the command line, and with it secrets.
        settings = wandb.Settings(console="off", silent=True, x_disable_meta=True, init_timeout=60)
        wandb.setup(settings)
        options: dict[str, Any] = {"project": run.project, "name": run.name, "id": run_id, "resume": "allow"}
        options |= {"dir": str(run.folder), "config": dict(run.config), "settings": settings}
        try:
            self._run = wandb.init(**options)
        except Exception as error:
            # Keep a mode chosen by the user.
            if os.environ.get("WANDB_MODE"):
                raise
            log.warning(
                "W&B is unreachable (%s): the run is stored in its folder for `wandb sync`.", type(error).__name__
            )
            wandb.teardown()
            wandb.setup(settings)
            self._run = wandb.init(**options, mode="offline")
        log.info("Tracker wandb: run %s in %s", run_id, without_secrets(self._run.url or self._run.dir))
        # Plot against training steps: W&B's own step counts milliseconds here (see ``log``).
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Any], seconds: float) -> None:
        """Log one history row."""
        # W&B rejects rows with a decreasing number. A resumed run repeats steps, and each offline attempt would count
        # from 0, but milliseconds since the first attempt always increase.
        self._row = max(self._row + 1, round(1000 * (time.time() - self._start_time)))
        self._run.log({"step": step, **values}, step=self._row)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a one-cell table, because W&B keeps each step's table."""
        self.log(step, {name: wandb.Table(columns=["step", "text"], data=[[step, text]])}, 0.0)

    def close(self, how: str) -> None:
        """Upload the remaining data; W&B shows a run with exit code 1 as failed."""
        self._run.finish(exit_code=0 if how in ("done", "stopped") else 1)
