"""A collective that fails says what was under way."""

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
    """Return what ``action`` returns; ClusterError that says what this rank was doing if communication fails.

    ``ranks`` are those that it works with, if ``doing`` does not say so.
    """
    # ``spans.waiting`` unfolded: this runs at each hop of each layer.
    before, DOING.wait = DOING.wait, doing
    DOING.count += 1
    try:
        return action()
    except RuntimeError as error:
        # A device that has failed, or is full, may say so here first.
        if isinstance(error, torch.OutOfMemoryError) or "CUDA error" in str(error):
            raise
        # gloo and NCCL name neither what was sent nor to whom; the first line of theirs is the cause.
        raise ClusterError(
            f"rank {dist.get_rank()} {doing}{_among(ranks)} ({DOING.place()}): {str(error).splitlines()[0]}\n"
            "A rank that it works with died or did not answer in time (run.timeout_seconds); its own log says why."
        ) from error
    finally:
        DOING.wait = before
        DOING.count += 1


def _among(ranks: Sequence[int]) -> str:
    """The ranks of a group, for a message."""
    if not ranks:
        return ""
    names = ", ".join(map(str, ranks[:_SHOWN]))
    if len(ranks) > _SHOWN:
        names += f", … {ranks[-1]}"
    return f" among ranks {names}"
