"""What a launcher has told this process, in its environment: DeepSpeed's, torchrun, or a scheduler."""

from __future__ import annotations

import os


def environment_rank() -> tuple[int, int]:
    """(rank, world size) that the launcher gave this process; (0, 1) when there was none."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def ranks_of_machine() -> int | None:
    """Ranks on this machine; None if nobody said."""
    # torchrun always says LOCAL_WORLD_SIZE, the deepspeed launcher LOCAL_SIZE, which a user may have exported for MPI.
    ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if not ranks:
        return None
    return int(ranks)
