"""Collectives with errors that name the failed operation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from longctx.errors import ClusterError
from parallel.runtime.activity import ACTIVITY

T = TypeVar("T")

_SHOWN = 8
"""Maximum number of ranks listed in a message."""


def named_collective(action: Callable[[], T], operation: str, ranks: Sequence[int] = ()) -> T:
    """Return the result of ``action``; if communication fails, raise ClusterError that names this rank's operation.

    ``ranks`` are the ranks involved, unless ``operation`` names them.
    """
    # ``spans.waiting``, inlined because this runs in each hop of each layer.
    before, ACTIVITY.wait = ACTIVITY.wait, operation
    ACTIVITY.count += 1
    try:
        return action()
    except RuntimeError as error:
        # A failed or full device may raise its error here first: keep the original.
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        # gloo and NCCL errors name neither the data nor the peer; their first line is the cause.
        raise ClusterError(
            f"rank {dist.get_rank()} {operation}{_among(ranks)} ({ACTIVITY.place()}): {str(error).splitlines()[0]}\n"
            "A peer died or did not respond in time (run.timeout_seconds); the peer's log gives the reason."
        ) from error
    finally:
        ACTIVITY.wait = before
        ACTIVITY.count += 1


def _among(ranks: Sequence[int]) -> str:
    if not ranks:
        return ""
    names = ", ".join(map(str, ranks[:_SHOWN]))
    if len(ranks) > _SHOWN:
        names += f", … {ranks[-1]}"
    return f" among ranks {names}"
