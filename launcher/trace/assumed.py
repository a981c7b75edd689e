"""Stand-ins for a traced rank's peers: groups that send no data, and balanced expert choices."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import comb
from typing import Any

import torch.distributed as dist
from torch import Tensor

from launcher.plan.planned_world import World
from launcher.trace.host_waits import HostWaits
from longctx.config import ModelConfig
from longctx.model.experts.dispatch import DispatchSizes
from parallel.comm import process_groups
from parallel.experts.dispatcher import AllToAllDispatcher
from parallel.mesh import Mesh


def join_world(rank: int, world: World) -> None:
    """Make this process one of the world's ranks, with fake groups that send no data."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group(backend="fake", store=FakeStore(), rank=rank, world_size=world.ranks)
    real = dist.new_group

    def new_group(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return real(ranks, backend="fake")

    # This process only traces; real groups would have no peers.
    dist.new_group = new_group
    # New groups take the world group's timeout, but a fake group has none.
    process_groups.world_timeout = timedelta


class EvenRouting(AllToAllDispatcher):
    """Dispatcher across ranks that assumes balanced load: tokens on every rank choose each expert equally often."""

    def __init__(self, mesh: Mesh, config: ModelConfig, waits: HostWaits) -> None:
        super().__init__(mesh, config.num_experts)
        self._chosen = config.experts_per_token
        self._waits = waits

    def read_sizes(self, counts_2tp2: Tensor, tiles: Sequence[slice]) -> list[DispatchSizes]:
        """Record the host wait for message sizes, and return the sizes for balanced load."""
        # A run's host waits here, since it does not know message sizes before.
        self._waits.add("aten::_local_scalar_dense", "the host needs the dispatch message sizes")
        return [self.even_sizes(tile.stop - tile.start) for tile in tiles]

    def even_sizes(self, num_tokens: int) -> DispatchSizes:
        """Return the sizes for a tile with ``num_tokens`` tokens on every rank."""
        ranks, experts_per_rank, k = self.mesh.expert, self.experts_per_rank, self._chosen
        # A token is sent once to each rank that has any of its k experts; C(E - e, k) / C(E, k) have none.
        unused_share = comb(ranks * experts_per_rank - experts_per_rank, k) / comb(ranks * experts_per_rank, k)
        counts = (round(num_tokens * (1 - unused_share)),) * ranks
        return DispatchSizes(send_counts=counts, recv_counts=counts, num_assignments=num_tokens * k)
