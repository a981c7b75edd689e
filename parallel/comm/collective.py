"""Collectives with errors that name the operation under way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from longctx.errors import ClusterError
from parallel.runtime.spans import DOING

T = TypeVar("T")

_SHOWN = 8
"""Ranks of a group that a message names."""


def named_collective(action: Callable[[], T], doing: str, ranks: Sequence[int] = ()) -> T:
    """Return the result of ``action``; raise ClusterError that names this rank's operation if communication fails.

    ``ranks`` are the ranks involved, if ``doing`` does not name them.
    """
    # ``spans.waiting`` inlined: this runs at each hop of each layer.
    before, DOING.wait = DOING.wait, doing
    DOING.count += 1
    try:
        return action()
    except RuntimeError as error:
        # A device that has failed, or is full, may raise its error here first.
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        # Errors of gloo and NCCL name neither the data nor the receiver; their first line is the cause.
        raise ClusterError(
            f"rank {dist.get_rank()} {doing}{_among(ranks)} ({DOING.place()}): {str(error).splitlines()[0]}\n"
            "A rank that it works with died or did not answer in time (run.timeout_seconds); its own log says why."
        ) from error
    finally:
        DOING.wait = before
        DOING.count += 1


def _among(ranks: Sequence[int]) -> str:
    """Return the ranks of a group as text, for a message."""
    if not ranks:
        return ""
    names = ", ".join(map(str, ranks[:_SHOWN]))
    if len(ranks) > _SHOWN:
        names += f", … {ranks[-1]}"
    return f" among ranks {names}"
