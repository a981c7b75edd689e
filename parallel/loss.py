"""One loss for a whole step: sums over every rank and micro-batch, divided by counts over the same."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.batch import PADDING_DOCUMENT, Batch
from longctx.config import ModelConfig
from longctx.objectives.loss_sum import LossSum
from parallel.comm.world import sum_over_ranks


@dataclass(frozen=True)
class StepCounts:
    """Global denominators of a step."""

    targets: int
    """Tokens whose prediction counts."""
    tokens: int
    """Tokens that are not padding."""

    def loss(self, sums: LossSum, config: ModelConfig) -> Tensor:
        """What one micro-batch of one rank adds to the step's loss: over all of them, these add up to the loss.

        The loss is the mean objective over the step's targets, plus the mean balance loss and router z-loss over its
        tokens, summed over layers and weighted as ``config`` says.
        """
        # Global counts below every sum: that is what makes the loss independent of degrees, accumulation and packing.
        of_routers = config.balance_loss_weight * sums.balance_sum + config.router_z_loss_weight * sums.z_sum
        return sums.objective_sum / max(1, self.targets) + of_routers / max(1, self.tokens)

    def mean_nll(self, nll_sum: float) -> float:
        """The loss to report: the step's negative log-likelihood a target."""
        return nll_sum / max(1, self.targets)


def count_tokens(batches: Iterable[Batch]) -> tuple[int, int]:
    """Targets and tokens of this rank's shards, which are on the CPU: counting them there waits for no device."""
    targets = tokens = 0
    for batch in batches:
        targets += batch.num_targets
        tokens += int((batch.document_ids != PADDING_DOCUMENT).sum())
    return targets, tokens


def sum_counts(own: tuple[int, int]) -> StepCounts:
    """Counts over every rank and micro-batch of the step, known before its first backward. Collective.

    ``own`` are those of this rank: one reduction for the whole step, whatever the number of micro-batches.
    """
    total = sum_over_ranks(torch.tensor(own, dtype=torch.int64))
    return StepCounts(int(total[0]), int(total[1]))


def count_step(batches: Iterable[Batch]) -> StepCounts:
    """``sum_counts`` of this rank's shards of a step. Collective."""
    return sum_counts(count_tokens(batches))
