"""``Mesh``: which rank does what, on named axes, and the process groups of those axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch.distributed import ProcessGroup

from longctx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Ranks arranged as data × context: rank = data_rank · context + context_rank.

    The ranks of a context group are neighbours, so they share a node where they can.
    """

    rank: int
    world_size: int
    context: int
    """Ranks that share one sequence."""
    context_group: ProcessGroup | None
    """Group of this rank's sequence; None when the sequence is not shared."""

    @classmethod
    def build(cls, *, context: int = 1, ulysses: int = 1, expert: int = 1) -> Mesh:
        """The mesh of the initialised process group (or of a lone process), entered by every rank alike.

        ConfigError when the degrees do not divide the world.
        """
        rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        check_degrees(world_size, context=context, ulysses=ulysses, expert=expert)
        group = None
        if context > 1:
            for first in range(0, world_size, context):  # every rank creates every group
                ranks = list(range(first, first + context))
                created = dist.new_group(ranks)
                if rank in ranks:
                    group = cast(ProcessGroup, created)
        return cls(rank=rank, world_size=world_size, context=context, context_group=group)

    @property
    def data(self) -> int:
        """Data degree: how many different sequences are worked on at once."""
        return self.world_size // self.context

    @property
    def data_rank(self) -> int:
        """Which of them this rank works on."""
        return self.rank // self.context

    @property
    def context_rank(self) -> int:
        """Which part of the sequence this rank holds."""
        return self.rank % self.context

    def context_peer(self, context_rank: int) -> int:
        """Global rank of the member of this rank's context group with that number."""
        return self.rank - self.context_rank + context_rank

    def describe(self) -> str:
        """One line for the log."""
        return f"{self.world_size} ranks = data {self.data} × context {self.context}"


def check_degrees(world_size: int, *, context: int, ulysses: int = 1, expert: int = 1) -> None:
    """ConfigError unless the axes fit the number of ranks."""
    for name, degree in (("context", context), ("ulysses", ulysses), ("expert", expert)):
        if degree < 1:
            raise ConfigError(f"parallel.{name}={degree} must be at least 1.")
    if ulysses > 1:
        raise ConfigError(f"parallel.ulysses={ulysses}: splitting heads is not built yet. Use parallel.ulysses=1.")
    if expert > 1:
        raise ConfigError(f"parallel.expert={expert}: experts across ranks are not built yet. Use parallel.expert=1.")
    if world_size % context:
        fits = [n for n in range(1, world_size + 1) if world_size % n == 0]
        raise ConfigError(
            f"parallel.context={context} does not divide the {world_size} ranks that were started.\n"
            f"Try parallel.context={min(fits, key=lambda n: (abs(n - context), n))} (any of {fits}), "
            f"or start a multiple of {context} ranks."
        )
