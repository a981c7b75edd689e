"""Which checkpoints of a run stay, and why; those that go are renamed before their files are removed."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.checkpoint.names import remove_checkpoint, step_of
from launcher.checkpoint.proof import is_proved
from launcher.config.sections import CheckpointSection
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import DataError
from longctx.files import read_manifest_bytes

log = logging.getLogger(__name__)

VALIDATION_LOSS = "validation_loss"
"""In a manifest's ``training``: the held-out loss of the weights that were saved, where they were validated."""


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
