"""A collective that fails says what was under way."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

from longctx.errors import ClusterError
from parallel.runtime.watch.spans import DOING

T = TypeVar("T")


def named_collective(action: Callable[[], T], doing: str) -> T:
    """Return what ``action`` returns; ClusterError that says what this rank was doing if communication fails."""
    # ``spans.waiting`` unfolded: this runs at each hop of each layer.
    before, DOING.wait = DOING.wait, doing
    DOING.count += 1
    try:
        return action()
    except RuntimeError as error:
        # gloo and NCCL name neither what was sent nor to whom; the first line of theirs is the cause.
        raise ClusterError(
            f"rank {dist.get_rank()} {doing} ({DOING.place()}): {str(error).splitlines()[0]}\n"
            "A rank that it works with died or did not answer in time (run.timeout_seconds); its own log says why."
        ) from error
    finally:
        DOING.wait = before
        DOING.count += 1
