"""A step that is not finite (NaN or infinity), or a spike: what its user reads where it is left out or ends the run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.rows.pack import BEST_FIT
from launcher.config.sections import RunConfig
from launcher.training.run import Run
from launcher.training.verdict import newest_checkpoint
from launcher.wording import first_names, plural
from longctx.errors import GradientError, TrainingError
from parallel.comm.world import gather_objects


@dataclass(frozen=True, kw_only=True)
class BrokenStep:
    """A step that cannot be taken, and what its user needs to go on."""

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
    spike: str = ""
    """By how much loss or norm exceed those before, of a step that is finite."""
    refused: str = ""
    """Why another hook has refused it, of a step that is finite and no spike."""
    ranks: Sequence[int] = ()
    """Ranks whose own part of the loss, or of a router's logits, is not finite."""
    in_row: int = 0
    """Steps that were left out right before it."""
    skip_steps: int = 0
    """``train.skip_steps``."""
    rows: str
    """Where the step's data stands."""
    lr: float
    """``train.lr``."""
    checkpoint: Path | None
    """The newest one, of a step that ends the run."""

    @property
    def is_last(self) -> bool:
        """Whether the run ends here. Where weights are no numbers, no later step can be better."""
        return bool(self.weights) or self.in_row >= self.skip_steps

    def error(self) -> TrainingError:
        """What ends the run."""
        # The trainer writes this record too: the curves then end with the step that broke.
        record = {"kind": "train", "step": self.step, "loss": self.loss, "lr": self.lr, "grad_norm": self.grad_norm}
        return TrainingError(self.message(), record)

    def warning(self) -> str:
        """What the log says of a step that is left out while the run goes on."""
        what = self._what_happened()
        return (
            f"Step {self.step} is left out, number {self.in_row + 1} in a row of the {self.skip_steps} that "
            f"train.skip_steps allows: {what}{self._where()} Weights and moments are those of the step before. "
            f"Its data: {self.rows}."
        )

    def message(self) -> str:
        """What happened, where, and how to go on: one screen."""
        lines = [self._what_happened() + self._where()]
        if self.in_row:
            before = f"{plural(self.in_row, 'step')} before it"
            lines.append(f"Left out for such a reason: {before}, as many as train.skip_steps={self.skip_steps} allows.")
        if self.grad_norm is not None and not self.spike and not self.refused:
            # Finite gradients whose squares overflow in the norm leave no name to give.
            where = first_names(self.gradients) or "in no single tensor, but all together are too large"
            lines.append(f"Gradients that are not finite: {where}.")
        if self.weights:
            lines.append(f"Weights that were not finite before this step: {first_names(self.weights)}.")
        lines.append("The step was not taken: weights, moments and checkpoints are those of the step before.")
        lines.append(self._way_out())
        lines.append(f"Its data, to look at: {self.rows}.")
        return "\n".join(lines)

    def _where(self) -> str:
        """The ranks that found it. Where ranks share a sequence, attention may have brought it there from another."""
        if not self.ranks:
            return ""
        return (
            f" Found in the tokens of {plural(len(self.ranks), 'rank')}: {first_names([str(r) for r in self.ranks])}."
        )

    def _what_happened(self) -> str:
        """The first line: which quantity is not finite."""
        if self.spike:
            return f"step {self.step} is a spike: {self.spike} (train.spike_sigmas)."
        if self.refused:
            return f"step {self.step} is refused: {self.refused}."
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


def find_broken(
    run: Run,
    step: int,
    *,
    loss: float,
    lr: float,
    order: dict[str, Any],
    routers: Sequence[str] = (),
    gradient: GradientError | None = None,
    spike: str = "",
    refused: str = "",
    own_finite: bool = True,
    in_row: int = 0,
) -> BrokenStep:
    """Look at a step that is left out: what is not finite in it, or that it is a ``spike`` or ``refused``. Collective.

    ``order`` is the loader's state before the step; ``own_finite`` says whether this rank's part of the loss is, and
    ``in_row`` how many steps were left out right before.
    """
    grad_norm, gradients = None, []
    if gradient is not None:
        grad_norm, gradients = gradient.norm, gradient.names
    # Collective: every rank looks at the weights that it owns, and all learn the names.
    weights, checkpoint = run.engine.broken_weights(), None
    if weights or in_row >= run.config.train.skip_steps:
        # The run ends, and names the newest checkpoint.
        checkpoint = newest_checkpoint(run)
    return BrokenStep(
        step=step,
        loss=loss,
        grad_norm=grad_norm,
        routers=routers,
        gradients=gradients,
        weights=weights,
        rows=rows_from(run.config, order),
        lr=run.config.train.lr,
        checkpoint=checkpoint,
        spike=spike,
        refused=refused,
        ranks=[rank for rank, is_finite in enumerate(gather_objects(own_finite)) if not is_finite],
        in_row=in_row,
        skip_steps=run.config.train.skip_steps,
    )


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
