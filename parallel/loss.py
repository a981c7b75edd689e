"""Counts over all ranks and micro-batches, by which a step normalizes its loss."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch

from longctx.objectives.task import Countable, Counts, Task
from parallel.comm.world import sum_over_ranks


def sum_counts(own: Counts) -> dict[str, int]:
    """Sum one step's counts over all ranks, before its first backward. Collective.

    ``own`` holds this rank's counts for the full step: one all-reduce, however many micro-batches. Raise TypeError if a
    count is not an integer.
    """
    # Building an int64 tensor directly would silently truncate fractions.
    counts = [operator.index(count) for count in own.values()]
    total = sum_over_ranks(torch.tensor(counts, dtype=torch.int64))
    return dict(zip(own, total.tolist(), strict=True))


def count_step(task: Task, batches: Iterable[Countable]) -> dict[str, int]:
    """Count this rank's shards and sum the counts over all ranks. Collective."""
    return sum_counts(task.count(batches))
