"""What a step's micro-batches and ranks add up to, and what the record of the step says of its experts.

Axes: L expert layers, E experts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from launcher.metrics import DEAD_AFTER_STEPS, Record, expert_name, max_violation, mean_violation
from longctx.config import ModelConfig
from longctx.errors import TrainingError
from longctx.objectives.causal_lm import LossSum
from parallel.loss import sum_over_ranks


@dataclass(frozen=True, kw_only=True)
class StepTotals:
    """Sums over every rank and micro-batch of a step: the same on every rank, known before the update."""

    nll: float
    """Negative log-likelihood of the targets."""
    balance: float
    """Load-balance loss before its weight, summed over tokens and layers."""
    router_z: float
    """Squared log-sum-exp of the router's logits, summed over tokens and layers."""
    counts_LE: Tensor
    """Tokens that chose the expert, by layer, int64; [0, 0] in a dense model."""
    facts_L4: Tensor
    """What the routers tell of themselves by layer, float64: ``RouterStats.facts_4``."""
    flops: float
    """Model FLOPs."""

    @property
    def finite(self) -> bool:
        """Whether every part of the loss is."""
        return all(math.isfinite(part) for part in (self.nll, self.balance, self.router_z))

    def check_router_logits(self, layers: Sequence[int], step: int) -> None:
        """TrainingError naming step and layers when a router's logits were not finite; the same on every rank."""
        wrong = [(layer, int(facts[3])) for layer, facts in zip(layers, self.facts_L4, strict=True) if facts[3]]
        if wrong:
            said = ", ".join(f"model.layers.{layer} ({count:,} tokens)" for layer, count in wrong[:8])
            more = f" and {len(wrong) - 8} more layers" if len(wrong) > 8 else ""
            raise TrainingError(
                f"router logits are not finite in step {step}: {said}{more}.\n"
                "The step was not taken: weights and checkpoints are those of the step before. Go on from the newest "
                "checkpoint (--run.resume latest) with a lower train.lr, a lower train.clip_norm or a "
                "model.router_z_loss_weight (1e-3), which keeps logits small."
            )


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


class StepSums:
    """This rank's sums over the micro-batches of a step; they stay on its device until ``over_ranks``."""

    def __init__(self) -> None:
        self._sums: tuple[Tensor, ...] | None = None

    def add(self, loss: LossSum) -> None:
        """Add a micro-batch."""
        scalars = torch.stack([x.detach().double() for x in (loss.nll_sum, loss.balance_sum, loss.z_sum)])
        own = (scalars, loss.counts_LE, loss.facts_L4)
        self._sums = own if self._sums is None else tuple(a + b for a, b in zip(self._sums, own, strict=True))

    def over_ranks(self, flops: float) -> StepTotals:
        """The sums over all ranks; ``flops`` are this rank's. Collective: one for everything that a step reports."""
        assert self._sums is not None
        scalars, counts_LE, facts_L4 = self._sums
        # float64 holds whole numbers up to 2^53: counts stay exact
        flat = torch.cat([scalars, counts_LE.flatten().double(), facts_L4.flatten().double()]).cpu()
        flat = sum_over_ranks(torch.cat([flat, flat.new_tensor([flops])]))
        parts = flat.split([3, counts_LE.numel(), facts_L4.numel(), 1])
        nll, balance, router_z = parts[0].tolist()
        return StepTotals(
            nll=nll,
            balance=balance,
            router_z=router_z,
            counts_LE=parts[1].long().view(counts_LE.shape),
            facts_L4=parts[2].view(facts_L4.shape),
            flops=float(parts[3]),
        )


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
