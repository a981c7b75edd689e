"""What a rank would be told by others, where values matter: how many tokens they send to its experts."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

from torch import Tensor

from launcher.trace.host_waits import HostWaits
from longctx.config import ModelConfig
from longctx.model.experts.dispatch import DispatchSizes
from parallel.experts.dispatcher import AllToAllDispatcher
from parallel.mesh import Mesh


class EvenRouting(AllToAllDispatcher):
    """Experts across ranks, where every expert is chosen equally often by the tokens of every rank."""

    def __init__(self, mesh: Mesh, config: ModelConfig, waits: HostWaits) -> None:
        super().__init__(mesh, config.num_experts)
        self._chosen = config.experts_per_token
        self._waits = waits

    def read_sizes(self, counts_2tp2: Tensor, tiles: Sequence[slice]) -> list[DispatchSizes]:
        """The sizes of an even routing. In a run the host waits here: messages have no size before."""
        self._waits.add("aten::_local_scalar_dense", "the sizes of messages to experts: the host must know them")
        return [even_sizes(tile.stop - tile.start, self) for tile in tiles]

    @property
    def chosen(self) -> int:
        """Experts a token."""
        return self._chosen


def even_sizes(num_tokens: int, routing: EvenRouting) -> DispatchSizes:
    """The sizes of a tile of so many tokens on every rank."""
    ranks, here, k = routing.mesh.expert, routing.experts_per_rank, routing.chosen
    # A token is sent once to each rank that has any of its experts.
    absent = comb(ranks * here - here, k) / comb(ranks * here, k)
    tokens = round(num_tokens * (1 - absent))
    return DispatchSizes(
        send_counts=(tokens,) * ranks,
        recv_counts=(tokens,) * ranks,
        num_assignments=num_tokens * k,
    )
