"""Expert figures of a step; dead experts."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from launcher.metrics.expert_load import DEAD_AFTER_STEPS, expert_name, max_violation, mean_violation
from launcher.metrics.record import Record
from launcher.training.totals import StepTotals
from longctx.config import ModelConfig


def expert_layers(model: ModelConfig) -> list[int]:
    """The layers that have experts, in order: the rows of every tensor with an L axis."""
    return [layer for layer in range(model.num_layers) if model.has_experts(layer)]


def expert_record(totals: StepTotals, layers: Sequence[int], num_tokens: int) -> Record:
    """What a train record says of the experts, ``docs/run-folder.md`` has the formulas; empty lists in a dense model.

    ``num_tokens`` is the step's, without padding.
    """
    loads = totals.counts_LE.tolist()
    square_L, entropy_L, dropped_L, _ = totals.facts_L4.unbind(1)
    tokens = max(1, num_tokens)
    chosen_L = totals.counts_LE.sum(1).clamp(min=1)
    return {
        "balance_loss": totals.balance / tokens / len(loads) if loads else None,
        "router_z_loss": totals.router_z / tokens if loads else None,
        "expert_layers": list(layers),
        "expert_load": loads,
        "expert_max_violation": [max_violation(counts) for counts in loads],
        "expert_mean_violation": [mean_violation(counts) for counts in loads],
        "expert_dropped_share": (dropped_L / chosen_L).tolist(),
        "router_entropy": (entropy_L / tokens).tolist(),
        "router_logit_rms": (square_L / tokens).sqrt().tolist(),
    }


class DeadExpertWatch:
    """Counts each expert's steps without a token, from where this process began; tells of each expert once."""

    def __init__(self, layers: Sequence[int], num_experts: int, window: int = DEAD_AFTER_STEPS) -> None:
        self._layers, self._window = list(layers), window
        self._idle_LE = torch.zeros(len(self._layers), num_experts, dtype=torch.int64)
        self._told_LE = torch.zeros_like(self._idle_LE, dtype=torch.bool)

    def find(self, counts_LE: Tensor) -> list[str]:
        """Names of the experts that no token has chosen in this step and the window before it, for the first time."""
        self._idle_LE = torch.where(counts_LE > 0, 0, self._idle_LE + 1)
        dead_LE = (self._idle_LE >= self._window) & ~self._told_LE
        self._told_LE |= dead_LE
        return [expert_name(self._layers[row], expert) for row, expert in dead_LE.nonzero().tolist()]

    def warning(self, names: Sequence[str], step: int, model: ModelConfig) -> str:
        """What to say of experts that ``find`` has found."""
        shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
        what = "is a dead expert" if len(names) == 1 else "are dead experts"
        return (
            f"{shown} {what}: no token chose {'it' if len(names) == 1 else 'them'} in steps "
            f"{step - self._window + 1} to {step}. What helps: a larger model.balance_loss_weight (now "
            f"{model.balance_loss_weight:g}), model.selection_bias with model.selection_bias_rate (DeepSeek-V3: 1e-3; "
            f"now {model.selection_bias_rate:g}), or a longer train.warmup_steps. Said once for each expert."
        )
