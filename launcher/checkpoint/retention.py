"""Which checkpoints of a run are proved, and which ones stay, and why.

Proved is one from whose weights training, or a validation, went on and gave a loss that can be right. A file beside the
manifest says so. It is written later than the manifest, so it is not under its hash: it names it.
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
from launcher.config.sections import CheckpointSection
from launcher.metrics.record import METRICS_FILE, readable_records
from longctx.checkpoint_format import list_checkpoints
from longctx.checkpoint_manifest import PROVED, read_proof, seal_proof
from longctx.errors import CheckpointError, DataError
from longctx.files import read_manifest_bytes, write_atomically

log = logging.getLogger(__name__)

VALIDATION_LOSS = "validation_loss"
"""In a manifest's ``training``: the held-out loss of the weights that were saved, where they were validated."""


@dataclass(frozen=True)
class Proof:
    """The loss that proves a checkpoint."""

    by: str
    """``step``, a later training step, or ``validation``, of the weights that were saved."""
    step: int
    loss: float
    """Nats a token."""


def is_in_range(loss: float, before: float) -> bool:
    """Whether a loss is finite and not far above the one ``before``: at most twice it, or 1 nat more."""
    # Twice a small loss is noise, and 1 nat more of a large one too.
    return math.isfinite(loss) and loss <= max(2 * before, before + 1)


def write_proof(folder: Path, manifest_hash: str, proof: Proof) -> None:
    """Write beside a committed checkpoint what proves it; CheckpointError where the disk refuses."""
    write_atomically(folder / PROVED, seal_proof(manifest_hash, asdict(proof)), CheckpointError)


def is_proved(folder: Path, manifest_hash: Any) -> bool:
    """Whether the checkpoint of this manifest is proved; a proof that names another manifest is none."""
    try:
        content = read_proof(folder)
    except CheckpointError:
        return False
    return content is not None and manifest_hash is not None and content.get("manifest") == manifest_hash


def broken_step_after(run_folder: Path, step: int, before: float = math.inf) -> int | None:
    """The first recorded training step after ``step``, up to ``before``, that was not finite; None where all were."""
    for record in readable_records(run_folder / METRICS_FILE):
        if record["kind"] == "train" and step < record["step"] <= before and not _is_finite(record):
            return record["step"]
    return None


def _is_finite(record: dict[str, Any]) -> bool:
    """Whether loss and gradient were finite; the gradient of a step that was left out may be None."""
    loss, norm = record.get("loss"), record.get("grad_norm", 0.0)
    # In a step without a loss no token counts.
    return norm is not None and math.isfinite(norm) and (loss is None or math.isfinite(loss))


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A committed checkpoint, as far as it matters to whether it stays."""

    folder: Path
    step: int
    validation_loss: float | None = None
    """Nats a token; None where its weights were not validated, or to no number."""
    is_proved: bool = False

    @classmethod
    def of(cls, folder: Path) -> Candidate:
        """What the folder and its manifest say; one that cannot be read has no loss, and is not proved."""
        try:
            manifest = _read_quickly(folder)
            training = dict(manifest["training"])
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError, DataError):
            return cls(folder=folder, step=step_of(folder))
        return cls.judged(folder, step_of(folder), training, is_proved=is_proved(folder, manifest.get("hash")))

    @classmethod
    def judged(cls, folder: Path, step: int, training: Mapping[str, Any], *, is_proved: bool) -> Candidate:
        """By what a manifest says of its run."""
        loss = training.get(VALIDATION_LOSS)
        if not isinstance(loss, float) or not math.isfinite(loss):
            loss = None
        return cls(folder=folder, step=step, validation_loss=loss, is_proved=is_proved)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What stays: the newest ones, and others beside them."""

    last: int
    """Newest checkpoints to keep; 0 keeps all."""
    every: int = 0
    """Keep those whose step this number divides; 0: none."""
    best: int = 0
    """Checkpoints of the lowest validation loss to keep."""

    @classmethod
    def of(cls, checkpoint: CheckpointSection) -> Retention:
        """As a run's config has it."""
        return cls(last=checkpoint.keep_last, every=checkpoint.keep_every, best=checkpoint.keep_best)

    def reasons(self, candidates: Sequence[Candidate]) -> dict[int, str]:
        """The steps that stay, each with why."""
        by_step = sorted(candidates, key=lambda one: one.step)
        # Whatever else is asked for.
        if not self.last:
            return {one.step: "all" for one in by_step}
        found = {one.step: f"last {self.last}" for one in by_step[-self.last :]}
        # Among equal losses the newer one.
        judged = sorted((one for one in by_step if one.validation_loss is not None), key=_loss_and_age)
        for one in judged[: self.best]:
            found.setdefault(one.step, f"best {self.best}")
        for one in by_step:
            if self.every and one.step % self.every == 0:
                found.setdefault(one.step, f"every {self.every}")
        # Until a newer one is proved, it is the one known to be good.
        proved = [one.step for one in by_step if one.is_proved]
        if proved:
            found.setdefault(proved[-1], "newest proved")
        return found


def prune(run_folder: Path, retention: Retention, held: Collection[int] = ()) -> None:
    """Remove the checkpoints that do not stay, except of the steps that are ``held`` for now.

    The log says which the file system would not remove.
    """
    if not retention.last:
        return
    candidates = [Candidate.of(folder) for folder in list_checkpoints(run_folder)]
    kept = retention.reasons(candidates)
    for one in candidates:
        if one.step not in kept and one.step not in held:
            remove_or_warn(one.folder)


def remove_or_warn(path: Path) -> bool:
    """Remove a folder of checkpoints; False, and a warning, where the file system refuses."""
    try:
        remove_checkpoint(path)
    except OSError as error:
        # It costs disk, and must not cost the run.
        log.warning("%s could not be removed: %s.", path, error)
        return False
    return True


def _read_quickly(folder: Path) -> Any:
    """A manifest without the checks that take ten times as long: this is done after every save."""
    content, most_values = read_manifest_bytes(folder)
    # Parsed, a value takes up to a hundred bytes.
    if content.count(b",") + content.count(b"[") + content.count(b"{") > most_values:
        raise ValueError("it has more values than a manifest")
    return json.loads(content)


def _loss_and_age(one: Candidate) -> tuple[float, int]:
    assert one.validation_loss is not None
    return one.validation_loss, -one.step
