"""The ranks of a planned run, and the kinds of them that differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.hostfile import read_hostfile
from launcher.config.sections import RunConfig

RANKS_IN_A_NODE = 8
"""At most, where nobody says."""


@dataclass(frozen=True, kw_only=True)
class World:
    """How many ranks, and how many of them a machine holds."""

    ranks: int
    ranks_per_node: int

    @classmethod
    def of(cls, config: RunConfig, ranks: int = 0, ranks_per_node: int = 0) -> World:
        """The world that was asked for; where 0, that of the hostfile that ``run.hostfile`` names.

        Without one it is the smallest that the config's degrees make, 8 ranks a machine.
        """
        if config.run.hostfile not in ("launcher", "none"):
            slots = list(read_hostfile(Path(config.run.hostfile)).values())
            ranks, ranks_per_node = ranks or sum(slots), ranks_per_node or slots[0]
        if not ranks:
            ranks = math.lcm(_fewest_ranks(config), config.parallel.expert)
        return cls(ranks=ranks, ranks_per_node=ranks_per_node or min(ranks, RANKS_IN_A_NODE))


def _fewest_ranks(config: RunConfig) -> int:
    """Ranks that share a micro-batch; where the run takes all there are, as many as a row needs."""
    parallel = config.parallel
    if parallel.tokens_per_rank <= 0 or parallel.context > 1:
        return parallel.context
    needed = -(-config.data.seq_len // parallel.tokens_per_rank)
    return -(-needed // parallel.ulysses) * parallel.ulysses


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """A rank that stands for those with the same kind of work."""

    rank: int
    names: tuple[str, ...]
    """What it is: the first of its ring, the last that shares the experts."""

    def describe(self) -> str:
        """One line for the report."""
        described = ", ".join(self.names)
        if not described:
            return f"rank {self.rank}"
        return f"rank {self.rank} ({described})"


def rank_kinds(config: RunConfig) -> list[RankKind]:
    """The ranks to look at: first, middle and last of the first ring, first and last of the first expert group."""
    parallel = config.parallel
    # A rank may be of several kinds, and is traced once.
    ring = parallel.context // parallel.ulysses
    names: dict[int, list[str]] = {0: []}
    if ring > 1:
        for place, ring_rank in (("first", 0), ("middle", ring // 2), ("last", ring - 1)):
            names.setdefault(ring_rank * parallel.ulysses, []).append(f"{place} of the ring")
    if parallel.ulysses > 1:
        # Heads that do not divide evenly leave the last rank fewer.
        names.setdefault(parallel.ulysses - 1, []).append("last of those that split heads")
    if parallel.expert > 1:
        names[0].append("first that shares the experts")
        names.setdefault(parallel.expert - 1, []).append("last that shares the experts")
    return [RankKind(rank=rank, names=tuple(names[rank])) for rank in sorted(names)]
