"""Proved checkpoints: training, or a validation, went on from their weights and gave a loss that can be right.

A file beside the manifest says so. It is written later than the manifest, so it is not under its hash: it names it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launcher.metrics.record import METRICS_FILE, readable_records
from longctx.checkpoint_manifest import PROVED, read_proof, seal_proof
from longctx.errors import CheckpointError
from longctx.files import write_atomically


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
    """Whether loss and gradient were numbers; the gradient of a step whose loss was none is None."""
    values = [record.get(key, 0.0) for key in ("loss", "grad_norm")]
    return all(value is not None and math.isfinite(value) for value in values)
