"""What a run leaves out of its data on purpose, said at its start and kept among its records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from data_pipeline.shards.reader import ShardSet
from launcher.metrics.record import Record
from launcher.training.origin import Origin


def exclusion_lines(folders: Sequence[ShardSet]) -> list[str]:
    """A line for each shard that the run does not read, with the reason."""
    return [f"Excluded from {shards.folder}: {line}." for shards in folders for line in shards.exclusions.lines()]


def exclusion_event(folders: Sequence[ShardSet], origin: Origin) -> Record | None:
    """The record of what is left out from the run's step on; None where nothing is, and nothing was before.

    It also names the list of each folder by its hash: two runs with equal ones have read the same.
    """
    found = [
        {"folder": str(shards.folder), "hash": shards.exclusions.hash, "shards": shards.exclusions.records()}
        for shards in folders
        if shards.excluded
    ]
    if not found and not _has_exclusions(origin.order):
        return None
    return {"kind": "event", "event": "exclusions", "step": origin.step, "folders": found}


def _has_exclusions(order: dict[str, Any] | None) -> bool:
    """Whether the run that is resumed left shards out, of its folder or of a mixture's source."""
    if order is None:
        return False
    parts = [order, *order.get("sources", {}).values()]
    return any(part.get("excluded") for part in parts)
