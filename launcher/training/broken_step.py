"""What to say of a step that is not finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


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


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
