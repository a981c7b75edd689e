"""One loss for a whole step: sums over every rank and micro-batch, divided by counts over the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.batch import PADDING_DOCUMENT, Batch
from longctx.config import ModelConfig


@dataclass(frozen=True)
class StepCounts:
    """Global denominators of a step."""

    targets: int
    """Tokens whose prediction counts."""
    tokens: int
    """Tokens that are not padding."""


def count_step(batches: Iterable[Batch], device: torch.device) -> StepCounts:
    """Counts over every rank and micro-batch of the step, known before its first backward. Collective."""
    targets = tokens = 0
    for batch in batches:
        targets += batch.num_targets
        tokens += int((batch.document_ids != PADDING_DOCUMENT).sum())
    total = sum_over_ranks(torch.tensor([targets, tokens], dtype=torch.int64, device=device))
    return StepCounts(int(total[0]), int(total[1]))


def micro_batch_loss(
    objective_sum: Tensor, balance_sum: Tensor, z_sum: Tensor, counts: StepCounts, config: ModelConfig
) -> Tensor:
    """This rank's and micro-batch's additive share of the step's loss; the shares sum to the loss.

    Mean objective over the step's targets, plus the mean balance loss and router z-loss over its tokens, summed over
    layers and weighted as ``config`` says.
    """
    of_routers = config.balance_loss_weight * balance_sum + config.router_z_loss_weight * z_sum
    return objective_sum / max(1, counts.targets) + of_routers / max(1, counts.tokens)


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum over all ranks, in place. Collective."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(values)
    return values
