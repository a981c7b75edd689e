"""What to say of a step that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.sections import RunConfig
from launcher.training.setup import Run
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import GradientError, TrainingError


@dataclass(frozen=True, kw_only=True)
class BrokenStep:
    """A step whose loss or gradient is not finite, and what its user needs to go on."""

    step: int
    loss: float
    grad_norm: float | None
    """None when the loss was not finite either: then the gradient says nothing more."""
    gradients: Sequence[str] = ()
    """Parameters whose gradients are not finite."""
    weights: Sequence[str] = ()
    """Parameters and buffers that held something that is not finite before the step."""
    rows: str
    """Where the step's data stands."""
    lr: float
    """``train.lr``."""
    checkpoint: Path | None
    """The newest one."""

    def message(self) -> str:
        """One screen."""
        if self.grad_norm is None:
            said = f"the loss of step {self.step} is not finite: {self.loss:g}, over all ranks."
            if math.isfinite(self.loss):
                said = f"the balance loss or z-loss of step {self.step} is not finite (loss {self.loss:g})."
        else:
            said = (
                f"the gradient of step {self.step} is not finite: norm {self.grad_norm:g}, though loss {self.loss:g}."
            )
            where = _some(self.gradients) or "in no single tensor, but all together are too large"
            said += f"\nGradients that are not finite: {where}."
        if self.weights:
            said += f"\nWeights that were not finite before this step: {_some(self.weights)}."
        return f"{said}\n{self._way_out()}"

    def _way_out(self) -> str:
        taken = "The step was not taken: weights, moments and checkpoints are those of the step before."
        advice = f"a lower train.lr (now {self.lr:g}) or a longer train.warmup_steps"
        go_on = "There is no checkpoint yet: start again"
        if self.checkpoint is not None:
            older = ", or from an older one should it hold such weights too" if self.weights else ""
            go_on = f"Go on from the newest checkpoint, {self.checkpoint} (--run.resume latest){older},"
        return f"{taken}\n{go_on} with {advice}.\nIts data, to look at: {self.rows}."


def broken_step(
    run: Run, step: int, *, loss: float, lr: float, order: dict[str, Any], gradient: GradientError | None = None
) -> TrainingError:
    """The error for a step whose loss, or else whose gradient, is not finite. Collective.

    ``order`` is the loader's state before the step.
    """
    broken = BrokenStep(
        step=step,
        loss=loss,
        grad_norm=None if gradient is None else gradient.norm,
        gradients=[] if gradient is None else gradient.names,
        weights=run.engine.broken_weights(),
        rows=_rows_from(run.config, order),
        lr=run.config.train.lr,
        checkpoint=next(reversed(list_checkpoints(run.folder)), None),
    )
    record = {"kind": "train", "step": step, "loss": loss, "lr": lr, "grad_norm": broken.grad_norm}
    return TrainingError(broken.message(), record)


def _rows_from(config: RunConfig, order: dict[str, Any]) -> str:
    """Where a step's rows stand in the data, in words."""
    data, seed, row, epoch = config.data, config.run.seed, order["epoch_row"], order["epoch"]
    said = f"{config.rows_per_step} rows of {data.train} from row {row} of epoch {epoch} on"
    if seed or epoch:
        return f"{said} (run.seed {seed})"
    return f"{said} (longctx data inspect {data.train} --seq-len {data.seq_len} --row {row})"


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
