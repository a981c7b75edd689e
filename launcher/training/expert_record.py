"""Expert figures of a step; dead experts."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from launcher.metrics.expert_load import DEAD_AFTER_STEPS, expert_name, max_violation, mean_violation
from launcher.metrics.record import Record
from launcher.training.totals import StepTotals
from launcher.wording import first_names
from longctx.config import ModelConfig

log = logging.getLogger(__name__)


def expert_layers(model: ModelConfig) -> list[int]:
    """The layers that have experts, in order: the rows of every tensor with an L axis."""
    return [layer for layer in range(model.num_layers) if model.has_experts(layer)]


def expert_record(totals: StepTotals, layers: Sequence[int], num_tokens: int) -> Record:
    """The fields of a train record about experts, empty lists in a dense model. Formulas: ``docs/run-folder.md``.

    ``num_tokens`` is the step's, without padding.
    """
    loads, routers = totals.counts_LE.tolist(), totals.diagnostics
    # A step of nothing but padding divides by 1, not by 0.
    tokens = max(1, num_tokens)
    chosen_L = totals.counts_LE.sum(1).clamp(min=1)
    balance_loss = router_z_loss = None
    if loads:
        balance_loss = totals.balance / tokens / len(loads)
        router_z_loss = totals.router_z / tokens
    return {
        "balance_loss": balance_loss,
        "router_z_loss": router_z_loss,
        "expert_layers": list(layers),
        "expert_load": loads,
        "expert_max_violation": [max_violation(counts) for counts in loads],
        "expert_mean_violation": [mean_violation(counts) for counts in loads],
        "expert_dropped_share": (routers.dropped_assignments / chosen_L).tolist(),
        "router_entropy": (routers.entropy / tokens).tolist(),
        "router_logit_rms": (routers.squared_logits / tokens).sqrt().tolist(),
    }


class DeadExpertWatch:
    """Counts each expert's steps without a token, from where this process began; reports each expert once."""

    def __init__(self, layers: Sequence[int], num_experts: int, window: int = DEAD_AFTER_STEPS) -> None:
        self._layers, self._window = list(layers), window
        self._idle_steps_LE = torch.zeros(len(self._layers), num_experts, dtype=torch.int64)
        self._reported_LE = torch.zeros_like(self._idle_steps_LE, dtype=torch.bool)

    def find(self, counts_LE: Tensor) -> list[str]:
        """Names of the experts that no token has chosen in this step and the window before it, for the first time."""
        self._idle_steps_LE = torch.where(counts_LE > 0, 0, self._idle_steps_LE + 1)
        # A dead expert stays dead for thousands of steps: once is enough.
        dead_LE = (self._idle_steps_LE >= self._window) & ~self._reported_LE
        self._reported_LE |= dead_LE
        return [expert_name(self._layers[row], expert) for row, expert in dead_LE.nonzero().tolist()]

    def watch(self, counts_LE: Tensor, step: int, model: ModelConfig) -> None:
        """Look at a step's loads, and warn of what is dead."""
        if dead := self.find(counts_LE):
            log.warning("%s", self.warning(dead, step, model))

    def warning(self, names: Sequence[str], step: int, model: ModelConfig) -> str:
        """The message about experts that ``find`` has found."""
        what, them = "are dead experts", "them"
        if len(names) == 1:
            what, them = "is a dead expert", "it"
        return (
            f"{first_names(names)} {what}: no token chose {them} in steps "
            f"{step - self._window + 1} to {step}. What helps: a larger model.balance_loss_weight (now "
            f"{model.balance_loss_weight:g}), model.selection_bias with model.selection_bias_rate (DeepSeek-V3: 1e-3; "
            f"now {model.selection_bias_rate:g}), or a longer train.warmup_steps. Said once for each expert."
        )
