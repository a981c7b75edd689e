"""The error of a step that is not finite (NaN or infinity)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launcher.config.sections import RunConfig
from launcher.training.setup import Run
from launcher.wording import first_names
from longctx.checkpoint_format import list_checkpoints
from longctx.errors import GradientError, TrainingError


@dataclass(frozen=True, kw_only=True)
class BrokenStep:
    """A step whose loss or gradient is not finite, and what its user needs to go on."""

    step: int
    loss: float
    grad_norm: float | None
    """None when the loss or a router was not finite either: then the gradient says nothing more."""
    routers: Sequence[str] = ()
    """Expert layers whose router's logits are not finite."""
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
        """What happened, where, and how to go on: one screen."""
        lines = [self._what_happened()]
        if self.grad_norm is not None:
            # Finite gradients whose squares overflow in the norm leave no name to give.
            where = first_names(self.gradients) or "in no single tensor, but all together are too large"
            lines.append(f"Gradients that are not finite: {where}.")
        if self.weights:
            lines.append(f"Weights that were not finite before this step: {first_names(self.weights)}.")
        lines.append("The step was not taken: weights, moments and checkpoints are those of the step before.")
        lines.append(self._way_out())
        lines.append(f"Its data, to look at: {self.rows}.")
        return "\n".join(lines)

    def _what_happened(self) -> str:
        """The first line: which quantity is not finite."""
        if self.routers:
            # The loss may well be finite: a token whose logits are not goes to no expert that counts.
            return f"router logits of step {self.step} are not finite: {first_names(self.routers, thing='layers')}."
        if self.grad_norm is not None:
            return (
                f"the gradient of step {self.step} is not finite: norm {self.grad_norm:g}, though loss {self.loss:g}."
            )
        if math.isfinite(self.loss):
            return (
                f"a part of the objective of step {self.step} is not finite (z-loss, label smoothing, balance loss or "
                f"router z-loss), though loss {self.loss:g}."
            )
        return f"the loss of step {self.step} is not finite: {self.loss:g}, over all ranks."

    def _way_out(self) -> str:
        """Where to go on from, and what to change."""
        advice = f"a lower train.lr (now {self.lr:g}) or a longer train.warmup_steps"
        if self.routers:
            advice += ", or a model.router_z_loss_weight (1e-3), which keeps logits small"
        if self.checkpoint is None:
            return f"There is no checkpoint yet: start again with {advice}."
        go_on = f"Go on from the newest checkpoint, {self.checkpoint} (--run.resume latest)"
        if self.weights:
            # Weights go bad a step before the loss shows it, so the newest checkpoint may have them already.
            go_on += ", or from an older one should it hold such weights too"
        return f"{go_on}, with {advice}."


def broken_step(
    run: Run,
    step: int,
    *,
    loss: float,
    lr: float,
    order: dict[str, Any],
    routers: Sequence[str] = (),
    gradient: GradientError | None = None,
) -> TrainingError:
    """The error for a step whose router logits or loss, or else whose gradient, are not finite. Collective.

    ``order`` is the loader's state before the step.
    """
    grad_norm, gradients = None, []
    if gradient is not None:
        grad_norm, gradients = gradient.norm, gradient.names
    broken = BrokenStep(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        routers=routers,
        gradients=gradients,
        # Collective: every rank looks at the weights that it owns, and all learn the names.
        weights=run.engine.broken_weights(),
        rows=rows_from(run.config, order),
        lr=run.config.train.lr,
        checkpoint=next(reversed(list_checkpoints(run.folder)), None),
    )
    # The trainer writes this record too: the curves then end with the step that broke.
    record = {"kind": "train", "step": step, "loss": loss, "lr": lr, "grad_norm": grad_norm}
    return TrainingError(broken.message(), record)


def rows_from(config: RunConfig, order: dict[str, Any]) -> str:
    """Where a step's rows are in the data, and the command that shows them."""
    if "sources" in order:
        return _mixed_rows_from(config, order)
    data, seed, epoch, block = config.data, config.run.seed, order["epoch"], order["block"]
    command = f"longctx data inspect {data.train} --seq-len {data.seq_len} --row {order['block_row']}"
    # Counted from its block: to find it in the epoch is to plan all blocks before it.
    for name, value in (("block", block), ("epoch", epoch), ("seed", seed)):
        if value:
            command += f" --{name} {value}"
    return f"{config.rows_per_step} rows of {data.train} from row {order['epoch_row']} of epoch {epoch} on ({command})"


def _mixed_rows_from(config: RunConfig, order: dict[str, Any]) -> str:
    """Where a step's rows are in each source of a mixture."""
    places = ", ".join(
        f"{name} from row {source['block_row']} of block {source['block']} of epoch {source['epoch']} on"
        for name, source in order["sources"].items()
    )
    first = order["rows_consumed"]
    # Right where the file is what it was from the beginning; the places are right in any case.
    command = f"longctx data sample {config.data.train} --seq-len {config.data.seq_len} --first-row {first}"
    if config.run.seed:
        command += f" --seed {config.run.seed}"
    return f"{config.rows_per_step} rows of {config.data.train} from row {first} of the run on ({places}; {command})"
