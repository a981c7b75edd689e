"""Trackio (Hugging Face) adapter, the only file that imports it.

Runs are local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set.
"""

from __future__ import annotations

import logging
import re
import secrets
import sys
import warnings
from collections.abc import Mapping
from typing import Any

import trackio  # pyright: ignore[reportMissingImports]

from launcher.metrics.trackers.tracker import TrackedRun, without_secrets

log = logging.getLogger(__name__)


class TrackioTracker:
    """The process's only trackio run."""

    def __init__(self, run: TrackedRun) -> None:
        # Trackio prints without an option to turn it off: give its modules a ``print`` that writes to the run's log.
        for name in [name for name in sys.modules if name.split(".")[0] == "trackio"]:
            vars(sys.modules[name])["print"] = _print
        # Raised as errors, its warnings are printed too, and so reach the log.
        warnings.filterwarnings("error", module=r"trackio\.utils$")
        # A run is identified by its name, and two folders may have the same name.
        name = str(run.load_state("trackio").get("name") or f"{run.name}-{secrets.token_hex(4)}")
        run.store_state("trackio", {"name": name, "project": run.project})
        # Its monitors read /proc and write every ten seconds: a hanging rank would look busy to the watchdog.
        quiet = {"embed": False, "auto_log_cpu": False, "auto_log_gpu": False}
        trackio.init(project=run.project, name=name, config=dict(run.config), resume="allow", **quiet)

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log one point per curve."""
        trackio.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text as a code block, because trackio renders Markdown."""
        trackio.log({name: trackio.Markdown(f"````text\n{text}\n````")}, step=step)

    def close(self, how: str) -> None:
        """Wait until all data is stored or sent."""
        trackio.finish()


def _print(*words: Any, **_: Any) -> None:
    # Strip terminal colors.
    if text := re.sub(r"\x1b\[[\d;]*m", "", without_secrets(" ".join(map(str, words)))).strip():
        log.info("Tracker trackio: %s", text)
