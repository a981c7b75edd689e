"""Skip steps that are not finite (NaN or infinity) or are spikes; too many in a row end the run."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_pipeline.rows.pack import BEST_FIT
from launcher.config.config_sections import RunConfig, TrainSection
from launcher.metrics.record import Record
from launcher.training.failure_report import newest_complete_checkpoint, way_out
from launcher.training.history import History
from launcher.training.hook import RunningStep, StepHook
from launcher.training.run_state import TrainingRun
from launcher.wording import first_names, format_count
from longctx.errors import TrainingError
from parallel.comm.world import gather_objects

log = logging.getLogger(__name__)

_NOT_FINITE = _ROUTER, _LOSS, _GRADIENT = "router", "loss", "gradient"
_SPIKE = "spike"


class SkipBadSteps(StepHook):
    """Hook that refuses such updates, and maintains the history for spike detection."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._routers: list[str] = []

    def before_update(self, step: RunningStep) -> None:
        """Refuse an update if router logits, loss or gradient norm are not finite, or if it is a spike."""
        self._routers = step.totals.non_finite_routers(self._run.expert_layers)
        if self._routers:
            step.refuse(_ROUTER)
        if not step.totals.finite:
            step.refuse(_LOSS)
        # The engine itself refuses a norm that is not finite; this only supplies the reason.
        step.refuse(_GRADIENT, lambda norm: not math.isfinite(norm))
        # Capture values, not the step, which would keep its data until garbage collection.
        history, loss = step.progress.history, step.loss
        step.refuse(_SPIKE, lambda norm: bool(self._spike(history, loss, norm)))

    def after_update(self, step: RunningStep) -> None:
        """Add the step to the history; raise TrainingError after too many skipped in a row. Collective if skipped."""
        history = step.progress.history
        if step.gradient_error is None:
            assert step.grad_norm is not None
            step.history = history.taken(step.loss, step.grad_norm)
            return
        step.skip_reason = step.refusal_reason(step.gradient_error.norm)
        skipped_step = self._collect_reasons(step)
        if skipped_step.is_last:
            raise skipped_step.error()
        # All ranks log it, and rank 0 also on the console.
        log.log(logging.WARNING if self._run.is_rank_0 else logging.INFO, "%s", skipped_step.warning())
        step.grad_norm, step.history = skipped_step.grad_norm, history.left_out()

    def before_log(self, step: RunningStep, record: Record) -> None:
        """Record the reason for skipping the step."""
        if step.skip_reason:
            record["skipped"] = step.skip_reason

    def _collect_reasons(self, step: RunningStep) -> SkippedStep:
        """Collect the reasons for skipping a step. Collective."""
        run, failure, history = self._run, step.gradient_error, step.progress.history
        assert failure is not None
        spike, rejection, grad_norm, gradients = "", "", None, []
        if step.skip_reason == _SPIKE:
            spike = self._spike(history, step.loss, failure.norm)
        elif step.skip_reason not in _NOT_FINITE:
            rejection = step.skip_reason
        # If the loss is not finite, its gradient adds no information.
        if step.totals.finite and not self._routers:
            grad_norm, gradients = failure.norm, failure.names
        # Each rank checks the weights that it owns, and all receive the names.
        weights, checkpoint = run.engine.nonfinite_weights(), None
        if weights or history.in_row >= run.config.train.skip_steps:
            # The run ends, and its message names the newest checkpoint.
            checkpoint = newest_complete_checkpoint(run)
        return SkippedStep(
            step=step.number,
            loss=step.loss if run.engine.model.num_loss_tokens(step.counts) else None,
            grad_norm=grad_norm,
            routers=self._routers,
            gradients=gradients,
            weights=weights,
            rows=rows_from(run.config, step.data.order),
            train=run.config.train,
            checkpoint=checkpoint,
            spike=spike,
            rejection=rejection,
            ranks=[rank for rank, finite in enumerate(gather_objects(step.sums.finite())) if not finite],
            in_row=history.in_row,
        )

    def _spike(self, history: History, loss: float, norm: float) -> str:
        return history.spike(loss, norm, self._run.config.train.spike_sigmas)


@dataclass(frozen=True, kw_only=True)
class SkippedStep:
    """A step that cannot be taken, with the information a user needs to continue."""

    step: int
    loss: float | None
    """None if no token counts."""
    grad_norm: float | None
    """None if the loss or a router was not finite either: then the gradient adds no information."""
    routers: Sequence[str]
    """Expert layers with router logits that are not finite."""
    gradients: Sequence[str]
    """Parameters with gradients that are not finite."""
    weights: Sequence[str]
    """Parameters and buffers with values that were not finite before the step."""
    spike: str
    """By how much a finite step's loss or norm exceeds the previous ones."""
    rejection: str
    """Reason from another hook, for a step that is finite and no spike."""
    ranks: Sequence[int]
    """Ranks with a non-finite loss or non-finite router logits on their own tokens."""
    in_row: int
    """Consecutive steps skipped right before it."""
    rows: str
    """The step's position in the data."""
    train: TrainSection
    checkpoint: Path | None
    """Newest checkpoint, if the step ends the run."""

    @property
    def is_last(self) -> bool:
        """True if the run ends here: if weights are not finite, no later step can be better."""
        return bool(self.weights) or self.in_row >= self.train.skip_steps

    def error(self) -> TrainingError:
        """Return the error that ends the run."""
        # The trainer also writes this record, so that the curves end with the failed step.
        record = {
            "kind": "train",
            "step": self.step,
            "loss": self.loss,
            "lr": self.train.lr,
            "grad_norm": self.grad_norm,
        }
        return TrainingError(self.message(), record)

    def warning(self) -> str:
        """Return the log message for a skipped step in a run that continues."""
        problem = self._describe()
        return (
            f"Step {self.step} is skipped, number {self.in_row + 1} in a row of the {self.train.skip_steps} that "
            f"train.skip_steps allows: {problem}{self._where()} Weights and moments are unchanged. Its data: "
            f"{self.rows}."
        )

    def message(self) -> str:
        """Return one screen: the problem, its location, and how to continue."""
        lines = [self._describe() + self._where()]
        if self.in_row:
            before = f"{format_count(self.in_row, 'step')} before it"
            lines.append(
                f"Skipped for such a reason: {before}, as many as train.skip_steps={self.train.skip_steps} allows."
            )
        if self.grad_norm is not None and not self.spike and not self.rejection:
            # Finite gradients may overflow in the norm's sum of squares; then there is no tensor to name.
            where = first_names(self.gradients) or "no single tensor, but their norm overflows"
            lines.append(f"Non-finite gradients: {where}.")
        if self.weights:
            lines.append(f"Non-finite weights before this step: {first_names(self.weights)}.")
        lines.append("The update was not applied: weights, moments and checkpoints are unchanged.")
        lines.append(self._way_out())
        lines.append(f"Its data, for inspection: {self.rows}.")
        return "\n".join(lines)

    def _where(self) -> str:
        """Name the ranks that found it. In a shared sequence, attention may have carried it over from another rank."""
        if not self.ranks:
            return ""
        return (
            f" Found in tokens on {format_count(len(self.ranks), 'rank')}: {first_names([str(r) for r in self.ranks])}."
        )

    def _describe(self) -> str:
        if self.spike:
            return f"step {self.step} is a spike: {self.spike} (train.spike_sigmas)."
        if self.rejection:
            return f"step {self.step} is rejected: {self.rejection}."
        if self.routers:
            # The loss may still be finite: a token with non-finite logits goes to no expert that counts.
            return f"router logits in step {self.step} are not finite: {first_names(self.routers, thing='layers')}."
        if self.grad_norm is not None:
            return f"the gradient in step {self.step} is not finite: norm {self.grad_norm:g}, though {self._loss_text}."
        if self.loss is None or math.isfinite(self.loss):
            return (
                f"an objective term in step {self.step} is not finite (z-loss, label smoothing, balance loss or "
                f"router z-loss), though {self._loss_text}."
            )
        return f"the loss in step {self.step} is not finite: {self.loss:g}, over all ranks."

    @property
    def _loss_text(self) -> str:
        if self.loss is None:
            return "the step has no target tokens"
        return f"loss {self.loss:g}"

    def _way_out(self) -> str:
        hint = f"a lower train.lr (now {self.train.lr:g}) or a longer train.warmup_steps"
        if self.routers:
            hint += ", or a model.router_z_loss_weight (1e-3), which keeps logits small"
        older = ""
        if self.weights and self.checkpoint is not None:
            # Weights go bad a step before the loss shows it, so the newest checkpoint may already contain them.
            older = ", or from an older one if it contains such weights too"
        return f"{way_out(self.checkpoint)}{older}, with {hint}."


def rows_from(config: RunConfig, order: dict[str, Any]) -> str:
    """Describe the position of a step's rows in the data, with the command that shows them."""
    data = config.data
    if "sources" in order:
        positions = ", ".join(
            f"{name} from epoch {source['epoch']}, block {source['block']}, row {source['block_row']} on"
            for name, source in order["sources"].items()
        )
        # The command is right only if the mixture's file has never changed; the positions are always right.
        where = f"from the run's row {order['rows_consumed']} on ({positions}; {_sample_command(config, order)})"
        return f"{config.rows_per_step} rows of {data.train} {where}"
    command = f"longctx data inspect {data.train} --seq-len {data.seq_len} --row {order['block_row']}"
    # Counted from its epoch block: counting from the epoch would require planning all epoch blocks before it.
    for name in ("block", "epoch"):
        if order[name]:
            command += f" --{name} {order[name]}"
    if config.run.seed:
        command += f" --seed {config.run.seed}"
    if str(config.packing) != str(BEST_FIT):
        # `data inspect` always packs in the default way; `data sample` has options for it.
        command = _sample_command(config, order)
    where = f"from row {order['epoch_row']} of epoch {order['epoch']} on ({command})"
    return f"{config.rows_per_step} rows of {data.train} {where}"


def _sample_command(config: RunConfig, order: dict[str, Any]) -> str:
    """Return the command that shows rows from the step's first one on, counted from the run's first row."""
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
