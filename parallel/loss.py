"""The counts of a step over every rank and micro-batch, by which one loss is made of their sums."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from longctx.objectives.task import Countable, Counts, Task
from parallel.comm.world import sum_over_ranks


def sum_counts(own: Counts) -> dict[str, int]:
    """Counts over every rank of the step, known before its first backward. Collective.

    ``own`` are those of this rank: one reduction for the whole step, whatever the number of micro-batches. TypeError
    for one that is no whole number.
    """
    # Not by a tensor's dtype alone, which would cut fractions off.
    counts = [operator.index(count) for count in own.values()]
    total = sum_over_ranks(torch.tensor(counts, dtype=torch.int64))
    return dict(zip(own, total.tolist(), strict=True))


def count_step(task: Task, batches: Iterable[Countable]) -> dict[str, int]:
    """``sum_counts`` of this rank's shards of a step. Collective."""
    return sum_counts(task.count(batches))
