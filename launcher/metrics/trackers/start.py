"""What a tracker is told of a run, and what it can do: the contract between the process and its adaptors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from longctx.files import write_atomically
from longctx.untrusted.reading import read_json

_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|CREDENTIAL", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")
_LEAST_SECRET = 6
"""Shorter values of variables with such names are no secrets, but 1, true or on."""


class Tracker(Protocol):
    """One run of a tracker, open for writing."""

    def metrics(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Add a point to each of these curves; ``seconds`` since 1970."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, such as a sample of what the model writes."""
        ...

    def finish(self, how: str) -> None:
        """Send what is left. ``how`` is done, stopped or failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class Start:
    """A run, as its tracker is to show it."""

    folder: Path
    """The run's folder: what stays on this machine goes there."""
    project: str
    name: str
    config: Mapping[str, str | int | float | bool]
    """The run's settings by dotted key."""

    def remembered(self, tracker: str) -> dict[str, Any]:
        """What an earlier attempt of the run has kept for this tracker; empty before the first one."""
        try:
            found = read_json(self._memory(tracker))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return found

    def remember(self, tracker: str, values: Mapping[str, Any]) -> None:
        """Keep values for the next attempt, so that it goes on with the same run of the tracker."""
        path = self._memory(tracker)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(values) + "\n").encode())

    def _memory(self, tracker: str) -> Path:
        return self.folder / "trackers" / f"{tracker}.json"


def without_secrets(text: str) -> str:
    """The text without values of the environment's keys, tokens and passwords, and without users of URLs."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return _USER_OF_URL.sub("***@", text)
