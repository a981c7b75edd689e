"""Warning about each expert that no token chooses any more, once."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from launcher.metrics.expert_load import DEAD_AFTER_STEPS, expert_name
from launcher.metrics.record import Record
from launcher.training.hook import RunningStep, StepHook
from launcher.wording import first_names
from longctx.config import ModelConfig

log = logging.getLogger(__name__)


class DeadExperts(StepHook):
    """Counts each expert's steps without a token since the start of this process; reports each expert once."""

    def __init__(
        self, model: ModelConfig, layers: Sequence[int], num_experts: int, window: int = DEAD_AFTER_STEPS
    ) -> None:
        self._model, self._layers, self._window = model, list(layers), window
        self._idle_steps_LE = torch.zeros(len(self._layers), num_experts, dtype=torch.int64)
        self._reported_LE = torch.zeros_like(self._idle_steps_LE, dtype=torch.bool)

    def find(self, counts_LE: Tensor) -> list[str]:
        """Return the experts that have now, for the first time, had no token for a full window of steps."""
        # A single token resets an expert's count.
        self._idle_steps_LE = torch.where(counts_LE > 0, 0, self._idle_steps_LE + 1)
        # A dead expert stays dead for thousands of steps, so report it only once.
        dead_LE = (self._idle_steps_LE >= self._window) & ~self._reported_LE
        self._reported_LE |= dead_LE
        return [expert_name(self._layers[row], expert) for row, expert in dead_LE.nonzero().tolist()]

    def before_log(self, step: RunningStep, record: Record) -> None:
        """Warn about dead experts. A skipped step has no load of its own."""
        if self._layers and not step.skip_reason and (dead := self.find(step.totals.counts_LE)):
            log.warning("%s", self.warning(dead, step.number))

    def warning(self, names: Sequence[str], step: int) -> str:
        """Return the warning about the experts from ``find``."""
        predicate, object_word = "are dead experts", "them"
        if len(names) == 1:
            predicate, object_word = "is a dead expert", "it"
        return (
            f"{first_names(names)} {predicate}: no token was routed to {object_word} in steps "
            f"{step - self._window + 1} to {step}. Try a larger model.balance_loss_weight (now "
            f"{self._model.balance_loss_weight:g}), model.selection_bias with model.selection_bias_rate (DeepSeek-V3: "
            f"1e-3; now {self._model.selection_bias_rate:g}), or a longer train.warmup_steps. Reported once per "
            "expert."
        )
