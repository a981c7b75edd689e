"""The error of a step that is not finite (NaN or infinity)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.rows.pack import BEST_FIT
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
    data = config.data
    if "sources" in order:
        places = ", ".join(
            f"{name} from row {source['block_row']} of block {source['block']} of epoch {source['epoch']} on"
            for name, source in order["sources"].items()
        )
        # The command is right where the file is what it was from the beginning; the places are right in any case.
        where = f"from row {order['rows_consumed']} of the run on ({places}; {_sample_command(config, order)})"
        return f"{config.rows_per_step} rows of {data.train} {where}"
    command = f"longctx data inspect {data.train} --seq-len {data.seq_len} --row {order['block_row']}"
    # Counted from its block: to find it in the epoch is to plan all blocks before it.
    for name in ("block", "epoch"):
        if order[name]:
            command += f" --{name} {order[name]}"
    if config.run.seed:
        command += f" --seed {config.run.seed}"
    if str(config.packing) != str(BEST_FIT):
        # `data inspect` packs in the usual way; `data sample` is told how.
        command = _sample_command(config, order)
    where = f"from row {order['epoch_row']} of epoch {order['epoch']} on ({command})"
    return f"{config.rows_per_step} rows of {data.train} {where}"


def _sample_command(config: RunConfig, order: dict[str, Any]) -> str:
    """What shows the rows from the step's first one on, counted from the run's."""
    data = config.data
    command = f"longctx data sample {data.train} --seq-len {data.seq_len} --first-row {order['rows_consumed']}"
    if config.run.seed:
        command += f" --seed {config.run.seed}"
    if data.packing != BEST_FIT.kind:
        command += f" --packing {data.packing}"
    if data.min_rest_tokens != BEST_FIT.min_rest_tokens:
        command += f" --min-rest-tokens {data.min_rest_tokens}"
    if data.fim_rate:
        command += f" --fim-rate {data.fim_rate} --fim-spm-rate {data.fim_spm_rate}"
        command += f" --fim-segment-tokens {data.fim_segment_tokens}"
    return command
