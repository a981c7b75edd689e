"""``join_world``: this process as one rank of a planned run. Collectives return at once and carry nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from launcher.plan.world import World


def join_world(rank: int, world: World) -> None:
    """Make this process one of the world's ranks. Every group is one that sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from parallel.comm import groups

    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world.ranks)
    real = dist.new_group

    def new_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return real(ranks, backend="fake")

    # This process serves nothing but the trace, and nobody answers on a real group.
    dist.new_group = new_group
    # Asked of the world group, which has none.
    groups.world_timeout = timedelta
