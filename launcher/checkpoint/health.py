"""Checkpoint health for a run: step, size, age, integrity, proof, and why retention keeps it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.stores.client import written_at
from data_pipeline.stores.urls import ObjectPath
from launcher.checkpoint.checkpoint_store import CheckpointStore, StoredCheckpoint
from launcher.checkpoint.load_checkpoint import check_training
from launcher.checkpoint.names import step_of
from launcher.checkpoint.resume import checkpoint_section, problems_of
from launcher.checkpoint.retention import Retention, RetentionCandidate, is_stable
from launcher.config.config_sections import CheckpointSection
from longctx.checkpoint_format import MANIFEST, CheckpointReader, list_checkpoints
from longctx.conversion.checkpoint_checks import check_checkpoint_tensors, check_manifest_tensors
from longctx.errors import CheckpointError, LongCtxError

STABLE, VALID, INVALID = "proved", "whole", "damaged"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One checkpoint's step, size, age and health."""

    step: int
    folder: Path | ObjectPath
    age_seconds: float
    """Time since the commit."""
    health: str
    """``proved``, ``whole`` (all file sizes match, or all hashes if requested) or ``damaged``."""
    num_bytes: int | None = None
    """None, like ranks and dtype, if the manifest is unreadable."""
    ranks: int | None = None
    """Also None for an imported checkpoint."""
    dtype: str | None = None
    problem: str | None = None
    """Description of the damage."""


def summaries(run: Path, *, check: bool) -> list[Summary]:
    """Summarize a run's committed checkpoints, oldest first; with ``check``, verify every hash."""
    return [_summary(folder, check=check) for folder in list_checkpoints(run)]


def stored_summaries(store: CheckpointStore, *, check: bool) -> list[Summary]:
    """Summarize a store's checkpoints like ``summaries``, using the sizes that the store lists."""
    return [_stored_summary(step, stored, check=check) for step, stored in store.checkpoints().items()]


def kept_steps_in_store(store: CheckpointStore) -> dict[int, str] | None:
    """Return ``kept_steps`` for a store, using the config in its newest checkpoint's manifest."""
    checkpoints = store.checkpoints()
    if not checkpoints:
        return {}
    try:
        # A store has no config.toml, but each manifest includes the run's config.
        section = checkpoints[max(checkpoints)].manifest()["training"].get("config", {}).get("checkpoint", {})
    except CheckpointError:
        return None
    retention = _retention(section)
    if retention is None:
        return None
    return retention.reasons([stored.candidate(step) for step, stored in checkpoints.items()])


def _stored_summary(step: int, stored: StoredCheckpoint, *, check: bool) -> Summary:
    age = time.time() - (written_at(stored.place / MANIFEST) or time.time())
    try:
        manifest = stored.manifest()
        check_manifest_tensors(manifest, str(stored.place))
    except LongCtxError as error:
        return Summary(step=step, folder=stored.place, age_seconds=age, health=INVALID, problem=str(error))
    # By size first: listing a store is cheap, and reading every object is not.
    expected_sizes = {name: entry["bytes"] for name, entry in manifest["files"].items()}
    problems = [
        f"{name} is missing, or its size differs"
        for name in expected_sizes
        if stored.sizes.get(name) != expected_sizes[name]
    ]
    if check and not problems:
        problems = stored.verify()
    return _build_summary(step, stored.place, age, manifest, problems, lambda: stored.candidate(step).is_stable)


def kept_steps(run: Path) -> dict[int, str] | None:
    """Map the steps that the run's retention keeps to their reasons; None if its config is unusable."""
    retention = _retention(checkpoint_section(run))
    if retention is None:
        return None
    return retention.reasons([RetentionCandidate.of(folder) for folder in list_checkpoints(run)])


def _summary(folder: Path, *, check: bool) -> Summary:
    # The folder name works even if the manifest is unreadable.
    step = step_of(folder)
    age = time.time() - (folder / MANIFEST).stat().st_mtime
    try:
        reader = CheckpointReader(folder)
        check_checkpoint_tensors(reader)
        check_training(reader)
    except LongCtxError as error:
        return Summary(step=step, folder=folder, age_seconds=age, health=INVALID, problem=str(error))
    # Cheap check first: sizes, then hashes over every byte.
    problems = reader.size_problems()
    if check and not problems:
        problems = problems_of(folder)
    manifest = reader.manifest
    return _build_summary(step, folder, age, manifest, problems, lambda: is_stable(folder, manifest["hash"]))


def _build_summary(
    step: int,
    folder: Path | ObjectPath,
    age: float,
    manifest: Mapping[str, Any],
    problems: Sequence[str],
    is_stable: Callable[[], bool],
) -> Summary:
    """Build the summary for a checkpoint with a readable manifest."""
    # A proof covers the saved state, not damage to the files since then, so damage takes precedence.
    health = VALID
    if problems:
        health = INVALID
    elif is_stable():
        health = STABLE
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
    """Return a config section's retention, with defaults for missing keys; None if the section is invalid."""
    defaults = CheckpointSection()
    # The section was read from a file and may be any type: a non-table has no ``get``.
    try:
        values = [section.get(key, getattr(defaults, key)) for key in ("keep_last", "keep_every", "keep_best")]
    except AttributeError:
        return None
    if not all(isinstance(value, int) for value in values):
        return None
    return Retention(last=values[0], every=values[1], best=values[2])
