"""Counts of a step over all ranks and micro-batches, used to make one loss of the ranks' sums."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from longctx.objectives.task import Countable, Counts, Task
from parallel.comm.world import sum_over_ranks


def sum_counts(own: Counts) -> dict[str, int]:
    """Sum the counts over all ranks of the step, before its first backward. Collective.

    ``own`` are this rank's counts: one reduction for the full step, whatever the number of micro-batches. Raise
    TypeError if a count is not an integer.
    """
    # A tensor's dtype alone would truncate fractions.
    counts = [operator.index(count) for count in own.values()]
    total = sum_over_ranks(torch.tensor(counts, dtype=torch.int64))
    return dict(zip(own, total.tolist(), strict=True))


def count_step(task: Task, batches: Iterable[Countable]) -> dict[str, int]:
    """Sum the counts of this rank's shards of a step over all ranks. Collective."""
    return sum_counts(task.count(batches))
