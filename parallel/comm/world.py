"""Coordination over all ranks in a run: errors, values, objects.

Unlike in a training step, a rank may be hours late here, while it hashes, converts, saves or evaluates; if it dies, the
wait ends at once. A process without a process group counts as the only rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from longctx import errors
from longctx.errors import LongCtxError
from parallel.comm.collective import named_collective
from parallel.comm.process_groups import control_group
from parallel.runtime.activity import waiting

T = TypeVar("T")


def own_rank() -> int:
    """Return this process's rank; 0 without a process group."""
    if not dist.is_initialized():
        return 0
    return dist.get_rank()


def num_ranks() -> int:
    """Return the world size; 1 without a process group."""
    if not dist.is_initialized():
        return 1
    return dist.get_world_size()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sum over all ranks, in place, with the step timeout. Collective."""
    if num_ranks() > 1:
        named_collective(lambda: dist.all_reduce(values), "summing over all ranks")
    return values


def raise_on_all_ranks(problem: LongCtxError | None) -> None:
    """Raise on every rank if any rank has a problem: its own error, or the first failed rank's. Collective.

    One rank's failure then ends all ranks, instead of leaving the others blocked in a collective.
    """
    own: tuple[str, str] | None = None
    if problem is not None:
        own = (type(problem).__name__, str(problem))
    # Send name and text instead of the exception: unpickling would call its constructor, which may take other
    # arguments.
    reports = gather_objects(own)
    if problem is not None:
        raise problem
    for rank, report in enumerate(reports):
        if report is not None:
            kind, message = report
            raise getattr(errors, kind)(f"rank {rank}: {message}")


def on_every_rank(action: Callable[[], T]) -> T:
    """Return the result of ``action`` once all ranks succeeded; if any rank failed, raise its LongCtxError on all."""
    problem, result = None, None
    try:
        result = action()
    except LongCtxError as error:
        problem = error
    raise_on_all_ranks(problem)
    return cast(T, result)


def on_rank_0(action: Callable[[], T]) -> T:
    """Return rank 0's result of ``action`` on every rank, or raise its LongCtxError; no time limit. Collective."""
    if not dist.is_initialized():
        return action()
    problem, result = None, None
    if dist.get_rank() == 0:
        try:
            result = action()
        except LongCtxError as error:
            problem = error
    raise_on_all_ranks(problem)
    return broadcast_object(result)


def long_barrier() -> None:
    """Wait for all ranks, which may be hours late. Collective."""
    if dist.is_initialized():
        with waiting("the other ranks", patient=True):
            dist.barrier(group=control_group())


def any_rank(value: bool) -> bool:
    """Return True if ``value`` is true on any rank; ranks may be hours late. Collective."""
    if not dist.is_initialized():
        return value
    found = torch.tensor([int(value)])
    with waiting("the other ranks", patient=True):
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=control_group())
    return bool(found)


def gather_objects(value: Any) -> list[Any]:
    """Return every rank's value, on every rank; ranks may be hours late. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    with waiting("the other ranks", patient=True):
        dist.all_gather_object(values, value, group=control_group())
    return values


def least_of_ranks(numbers: Sequence[int]) -> list[int]:
    """Return the elementwise minimum over all ranks, on every rank; faster than ``gather_objects``. Collective.

    Ranks may be hours late, such as rank 0 while it commits the last checkpoint to a slow disk.
    """
    least = torch.tensor(numbers, dtype=torch.int64)
    if dist.is_initialized():
        with waiting("the other ranks", patient=True):
            dist.all_reduce(least, dist.ReduceOp.MIN, group=control_group())
    return least.tolist()


def gather_on_rank_0(value: Any) -> list[Any]:
    """Return every rank's value on rank 0, and an empty list on the others; ranks may be hours late. Collective."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] | None = None
    if dist.get_rank() == 0:
        values = [None] * dist.get_world_size()
    with waiting("the other ranks", patient=True):
        dist.gather_object(value, values, dst=0, group=control_group())
    return values or []


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank; rank 0 may be hours late. Collective."""
    if not dist.is_initialized():
        return value
    holder = [value]
    with waiting("rank 0", patient=True):
        dist.broadcast_object_list(holder, src=0, group=control_group())
    return holder[0]
