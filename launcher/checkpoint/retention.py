"""Proof and retention for a run's checkpoints.

A checkpoint is proved once training or validation has continued from its weights with a plausible loss. A file next to
the manifest records this. It is written later, so the manifest's hash cannot cover it; the file names that hash
instead.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint.names import remove_checkpoint, step_of
from launcher.config.config_sections import CheckpointSection
from launcher.metrics.record import METRICS_FILE, readable_records
from longctx.checkpoint_format import list_checkpoints
from longctx.checkpoint_manifest import PROOF_FILE, read_proof, seal_proof
from longctx.errors import CheckpointError, DataError
from longctx.files import read_manifest_bytes, write_atomically

log = logging.getLogger(__name__)

VALIDATION_LOSS = "validation_loss"
"""Key in a manifest's ``training``: held-out loss with the saved weights, if they were validated."""


@dataclass(frozen=True)
class Proof:
    """Loss that proves a checkpoint."""

    by: str
    """``step`` for a later training step, or ``validation`` for a validation with the saved weights."""
    step: int
    loss: float
    """Nats per token."""


def is_in_range(loss: float, before: float) -> bool:
    """Return True if a loss is finite and at most twice the loss ``before``, or at most 1 nat above it."""
    # Twice a small loss is within noise, and so is 1 nat above a large one.
    return math.isfinite(loss) and loss <= max(2 * before, before + 1)


def write_proof(folder: Path, manifest_hash: str, proof: Proof) -> None:
    """Write a committed checkpoint's proof into its folder. Raise CheckpointError if the disk refuses."""
    write_atomically(folder / PROOF_FILE, seal_proof(manifest_hash, asdict(proof)), CheckpointError)


def is_stable(folder: Path, manifest_hash: Any) -> bool:
    """Return True if this manifest's checkpoint is proved; a proof for another manifest does not count."""
    try:
        content = read_proof(folder)
    except CheckpointError:
        return False
    return content is not None and manifest_hash is not None and content.get("manifest") == manifest_hash


def first_nonfinite_step(run_folder: Path, step: int, before: float = math.inf) -> int | None:
    """Return the first training step in (``step``, ``before``] with a non-finite record, or None."""
    for record in readable_records(run_folder / METRICS_FILE):
        if record["kind"] == "train" and step < record["step"] <= before and not _is_finite(record):
            return record["step"]
    return None


def _is_finite(record: dict[str, Any]) -> bool:
    """Return True if loss and gradient norm are finite. A skipped step may record the norm as None: not finite."""
    loss, norm = record.get("loss"), record.get("grad_norm", 0.0)
    # A step without counted tokens has no loss.
    return norm is not None and math.isfinite(norm) and (loss is None or math.isfinite(loss))


@dataclass(frozen=True, kw_only=True)
class RetentionCandidate:
    """Properties that decide whether a committed checkpoint is kept."""

    folder: Path
    step: int
    validation_loss: float | None = None
    """Nats per token; None without a validation of its weights, or if its loss was not finite."""
    is_stable: bool = False

    @classmethod
    def of(cls, folder: Path) -> RetentionCandidate:
        """Read a folder's candidate; an unreadable one has no loss and is not proved."""
        try:
            manifest = _read_quickly(folder)
            training = dict(manifest["training"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, DataError):
            return cls(folder=folder, step=step_of(folder))
        return cls.from_training(folder, step_of(folder), training, is_stable=is_stable(folder, manifest.get("hash")))

    @classmethod
    def from_training(
        cls, folder: Path, step: int, training: Mapping[str, Any], *, is_stable: bool
    ) -> RetentionCandidate:
        """Build a candidate from a manifest's ``training`` section."""
        loss = training.get(VALIDATION_LOSS)
        if not isinstance(loss, float) or not math.isfinite(loss):
            loss = None
        return cls(folder=folder, step=step, validation_loss=loss, is_stable=is_stable)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Rule for keeping checkpoints: the newest ones and a few others."""

    last: int
    """Newest checkpoints to keep; 0 keeps all."""
    every: int = 0
    """Also keep steps divisible by this number; 0 disables this rule."""
    best: int = 0
    """Also keep this many checkpoints with the lowest validation loss."""

    @classmethod
    def of(cls, checkpoint: CheckpointSection) -> Retention:
        """Return the retention configured for a run."""
        return cls(last=checkpoint.keep_last, every=checkpoint.keep_every, best=checkpoint.keep_best)

    def reasons(self, candidates: Sequence[RetentionCandidate]) -> dict[int, str]:
        """Map the steps to keep to their reasons."""
        by_step = sorted(candidates, key=lambda one: one.step)
        # 0 keeps all, regardless of the other fields.
        if not self.last:
            return {one.step: "all" for one in by_step}
        # A step that several rules keep reports the first one: last, best, every, newest proved.
        found = {one.step: f"last {self.last}" for one in by_step[-self.last :]}
        # Among equal losses the newer one wins.
        judged = sorted((one for one in by_step if one.validation_loss is not None), key=_loss_and_age)
        for one in judged[: self.best]:
            found.setdefault(one.step, f"best {self.best}")
        for one in by_step:
            if self.every and one.step % self.every == 0:
                found.setdefault(one.step, f"every {self.every}")
        # The newest proved checkpoint is the fallback until a later one is proved.
        stable_steps = [one.step for one in by_step if one.is_stable]
        if stable_steps:
            found.setdefault(stable_steps[-1], "newest proved")
        return found


def prune_checkpoints(run_folder: Path, retention: Retention, held: Collection[int] = ()) -> None:
    """Remove checkpoints that retention does not keep, except the ``held`` steps.

    Folders that the file system refuses to remove are logged.
    """
    if not retention.last:
        return
    candidates = [RetentionCandidate.of(folder) for folder in list_checkpoints(run_folder)]
    kept = retention.reasons(candidates)
    for one in candidates:
        if one.step not in kept and one.step not in held:
            remove_or_warn(one.folder)


def remove_or_warn(path: Path) -> bool:
    """Remove a checkpoint folder; if the file system refuses, warn and return False."""
    try:
        remove_checkpoint(path)
    except OSError as error:
        # A leftover folder costs disk space but must not end the run.
        log.warning("%s could not be removed: %s.", path, error)
        return False
    return True


def _read_quickly(folder: Path) -> Any:
    """Parse a manifest without its checks, which take ten times as long: this runs after every save."""
    content, most_values = read_manifest_bytes(folder)
    # A parsed value takes up to a hundred bytes, so limit their number before parsing.
    if content.count(b",") + content.count(b"[") + content.count(b"{") > most_values:
        raise ValueError("it has too many values for a manifest")
    return json.loads(content)


def _loss_and_age(one: RetentionCandidate) -> tuple[float, int]:
    assert one.validation_loss is not None
    return one.validation_loss, -one.step
