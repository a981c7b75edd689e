"""``Tracker`` protocol, and the run description that adapters receive."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from launcher.metrics.expert_load import LAYER_STATISTIC_KEYS, idle_share, layer_numbers, load_entropy, max_over_mean
from longctx.files import write_atomically
from longctx.untrusted.strict_json import read_json

_SECRET = re.compile(r"KEY|TOKEN|PASSWORD|SECRET|CREDENTIAL", re.IGNORECASE)
_USER_OF_URL = re.compile(r"(?<=://)[^/@\s]+@")
_LEAST_SECRET = 6
"""Minimum length of a secret: shorter values in such variables are 1, true or on."""


class Tracker(Protocol):
    """One tracker run, open for writing. All calls come from one thread; an exception ends the tracker."""

    def log(self, step: int, values: Mapping[str, float], seconds: float) -> None:
        """Add a point to each curve; ``seconds`` since 1970."""
        ...

    def text(self, step: int, name: str, text: str) -> None:
        """Add a text, such as a sample from the model."""
        ...

    def close(self, how: str) -> None:
        """Send the remaining data. ``how`` is done, stopped, launcher (the launcher is gone) or failed."""
        ...


@dataclass(frozen=True, kw_only=True)
class TrackedRun:
    """Run description from which an adapter opens the run."""

    folder: Path
    """Run folder, which also holds files for trackers without a server."""
    project: str
    name: str
    config: Mapping[str, str | int | float | bool]
    """Settings by dotted key, without secrets."""
    first_step: int
    """First step that this attempt records; an earlier attempt may have recorded it and later ones."""

    def load_state(self, tracker: str) -> dict[str, Any]:
        """Return values that an earlier attempt stored for this tracker; empty on the first attempt."""
        try:
            found = read_json(self._memory(tracker))
        except (OSError, ValueError):
            return {}
        if not isinstance(found, dict):
            return {}
        return found

    def store_state(self, tracker: str, values: Mapping[str, Any]) -> None:
        """Store values for the next attempt, so that it continues the same tracker run."""
        path = self._memory(tracker)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, (json.dumps(values) + "\n").encode())

    def _memory(self, tracker: str) -> Path:
        return self.folder / "trackers" / f"{tracker}.json"


def without_secrets(text: str) -> str:
    """Mask values from secret environment variables (keys, tokens, passwords) and users in URLs."""
    for name, value in os.environ.items():
        if _SECRET.search(name) and len(value) >= _LEAST_SECRET:
            text = text.replace(value, "***")
    return _USER_OF_URL.sub("***@", text)


def series(record: Mapping[str, Any]) -> dict[str, float]:
    """Return a record's numbers by curve name, with expert statistics by layer and losses by position and source."""
    kind = record["kind"]
    if kind == "event":
        return {}
    # Booleans are ints in Python, but flags are no curves.
    pairs = [
        (f"{kind}/{key}", float(value))
        for key, value in record.items()
        if key != "step" and isinstance(value, int | float) and not isinstance(value, bool)
    ]
    # Log a large model's layers only in steps with written counts: a point per layer and step is too much.
    if record.get("expert_load"):
        pairs += _of_layers(record)
    for name, tokens in (record.get("source_tokens") or {}).items():
        pairs.append((f"source_tokens/{name}", float(tokens)))
    for name, source in (record.get("loss_by_source") or {}).items():
        pairs.append((f"validation_loss_by_source/{name}", float(source["loss"])))
    for entry in record.get("loss_by_position") or []:
        pairs.append((f"validation_loss_by_position/from_{entry['start']}", float(entry["loss"])))
    return dict(pairs)


def _of_layers(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    pairs: list[tuple[str, float]] = []
    layers = layer_numbers(record)
    for layer, counts in zip(layers, record["expert_load"], strict=True):
        pairs.append((f"expert_max_over_mean/layer_{layer}", max_over_mean(counts)))
        pairs.append((f"expert_idle_share/layer_{layer}", idle_share(counts)))
        pairs.append((f"expert_load_entropy/layer_{layer}", load_entropy(counts)))
    # Records from earlier releases lack some keys.
    for key in LAYER_STATISTIC_KEYS:
        pairs += [
            (f"{key}/layer_{layer}", float(value)) for layer, value in zip(layers, record.get(key) or [], strict=False)
        ]
    return pairs
