"""Trackio (Hugging Face): the only file that imports it. Local unless TRACKIO_SPACE_ID or TRACKIO_SERVER_URL is set."""

from __future__ import annotations

import secrets
from collections.abc import Mapping

import trackio  # pyright: ignore[reportMissingImports]

from launcher.metrics.trackers.start import Start

NAME = "trackio"


def open_tracker(start: Start) -> TrackioRun:
    """Go on with the run's trackio run, or make one."""
    # There a run is its name, and two folders may have one name.
    name = str(start.remembered(NAME).get("name") or f"{start.name}-{secrets.token_hex(4)}")
    start.remember(NAME, {"name": name, "project": start.project})
    trackio.init(project=start.project, name=name, config=dict(start.config), resume="allow", embed=False)
    return TrackioRun()


class TrackioRun:
    """Writes to the process's one run of trackio."""

    def metrics(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Log a point of each curve."""
        trackio.log(dict(values), step=step)

    def text(self, step: int, name: str, text: str) -> None:
        """Log a text as it is."""
        # Of Markdown, a block of code: the model's own marks are no marks.
        trackio.log({name: trackio.Markdown(f"````text\n{text}\n````")}, step=step)

    def finish(self, how: str) -> None:
        """Wait until all is stored, or sent."""
        trackio.finish()
