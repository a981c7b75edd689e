"""Health of a run's checkpoints: step, size, age, integrity, proof, and which ones retention keeps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.stores.client import written_at
from data_pipeline.stores.urls import ObjectPath
from launcher.checkpoint.folder import checkpoint_section, problems_of
from launcher.checkpoint.load import check_training
from launcher.checkpoint.names import step_of
from launcher.checkpoint.retention import Candidate, Retention, is_proved
from launcher.checkpoint.store import Store, StoredCheckpoint
from launcher.config.sections import CheckpointSection
from longctx.checkpoint_format import MANIFEST, CheckpointReader, list_checkpoints
from longctx.conversion.checks import check_model, check_tensors
from longctx.errors import CheckpointError, LongCtxError

PROVED, WHOLE, DAMAGED = "proved", "whole", "damaged"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Summary of one checkpoint."""

    step: int
    folder: Path | ObjectPath
    age_seconds: float
    """Since it was committed."""
    health: str
    """``proved``, ``whole`` by the size of its files (or their hashes, where these were asked for) or ``damaged``."""
    num_bytes: int | None = None
    """None, as ranks and dtype, where the manifest cannot be read."""
    ranks: int | None = None
    """None of an imported one too."""
    dtype: str | None = None
    problem: str | None = None
    """What is damaged."""


def summaries(run: Path, *, check: bool) -> list[Summary]:
    """Return summaries of a run's committed checkpoints, oldest first; with ``check``, verify every hash."""
    return [_summary(folder, check=check) for folder in list_checkpoints(run)]


def stored_summaries(store: Store, *, check: bool) -> list[Summary]:
    """Return ``summaries`` of the checkpoints in a store, with the sizes that the store lists."""
    return [_stored_summary(step, stored, check=check) for step, stored in store.committed().items()]


def staying_there(store: Store) -> dict[int, str] | None:
    """Return ``staying`` for a store, by the config in its newest checkpoint's manifest."""
    there = store.committed()
    if not there:
        return {}
    try:
        section = there[max(there)].manifest()["training"].get("config", {}).get("checkpoint", {})
    except CheckpointError:
        return None
    retention = _retention(section)
    if retention is None:
        return None
    return retention.reasons([stored.candidate(step) for step, stored in there.items()])


def _stored_summary(step: int, stored: StoredCheckpoint, *, check: bool) -> Summary:
    age = time.time() - (written_at(stored.place / MANIFEST) or time.time())
    try:
        manifest = stored.manifest()
        check_model(manifest, str(stored.place))
    except LongCtxError as error:
        return Summary(step=step, folder=stored.place, age_seconds=age, health=DAMAGED, problem=str(error))
    listed = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    problems = [f"{name} is missing, or of another size" for name in listed if stored.sizes.get(name) != listed[name]]
    if check and not problems:
        problems = stored.verify()
    return _judged(step, stored.place, age, manifest, problems, lambda: stored.candidate(step).is_proved)


def staying(run: Path) -> dict[int, str] | None:
    """Return the steps that the run's retention keeps, each with the reason; None if its config is unusable."""
    retention = _retention(checkpoint_section(run))
    if retention is None:
        return None
    return retention.reasons([Candidate.of(folder) for folder in list_checkpoints(run)])


def _summary(folder: Path, *, check: bool) -> Summary:
    # From the folder's name, which works even if the manifest cannot be read.
    step = step_of(folder)
    age = time.time() - (folder / MANIFEST).stat().st_mtime
    try:
        reader = CheckpointReader(folder)
        check_tensors(reader)
        check_training(reader)
    except LongCtxError as error:
        return Summary(step=step, folder=folder, age_seconds=age, health=DAMAGED, problem=str(error))
    # From cheap to expensive.
    problems = reader.wrong_sizes()
    if check and not problems:
        problems = problems_of(folder)
    manifest = reader.manifest
    return _judged(step, folder, age, manifest, problems, lambda: is_proved(folder, manifest["hash"]))


def _judged(
    step: int,
    folder: Path | ObjectPath,
    age: float,
    manifest: Mapping[str, Any],
    problems: Sequence[str],
    is_proved: Callable[[], bool],
) -> Summary:
    """Return the summary of a checkpoint with a readable manifest."""
    # A proof covers the state that was saved, not damage to its files since then.
    health = WHOLE
    if problems:
        health = DAMAGED
    elif is_proved():
        health = PROVED
    return Summary(
        step=step,
        folder=folder,
        age_seconds=age,
        health=health,
        num_bytes=sum(entry["bytes"] for entry in manifest["files"].values()),
        ranks=manifest["training"].get("world_size"),
        dtype=manifest["dtype"],
        problem="; ".join(problems) or None,
    )


def _retention(section: Any) -> Retention | None:
    """Return the retention of a config section, defaults for missing keys; None if the section is invalid."""
    defaults = CheckpointSection()
    try:
        values = [section.get(key, getattr(defaults, key)) for key in ("keep_last", "keep_every", "keep_best")]
    except AttributeError:
        return None
    if not all(isinstance(value, int) for value in values):
        return None
    return Retention(last=values[0], every=values[1], best=values[2])
