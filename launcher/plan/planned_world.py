"""Ranks in a planned run, and the kinds of ranks that differ."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from launcher.cluster.hostfile import read_hostfile
from launcher.config.config_sections import RunConfig

RANKS_IN_A_NODE = 8
"""Default ranks per machine, at most."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Ranks in total, and per machine."""

    ranks: int
    ranks_per_node: int

    @classmethod
    def of(cls, config: RunConfig, ranks: int = 0, ranks_per_node: int = 0) -> World:
        """Return the requested world; the hostfile replaces a 0, if ``run.hostfile`` names one.

        Without a hostfile, choose the smallest world for the config's degrees, with at most 8 ranks per machine.
        """
        if config.run.hostfile not in ("launcher", "none"):
            slots = list(read_hostfile(Path(config.run.hostfile)).values())
            ranks, ranks_per_node = ranks or sum(slots), ranks_per_node or slots[0]
        if not ranks:
            ranks = math.lcm(_min_ranks(config), config.parallel.expert)
        return cls(ranks=ranks, ranks_per_node=ranks_per_node or min(ranks, RANKS_IN_A_NODE))


def _min_ranks(config: RunConfig) -> int:
    """Return how many ranks share a micro-batch; if ``tokens_per_rank`` decides, as many as a row needs."""
    parallel = config.parallel
    if parallel.tokens_per_rank <= 0 or parallel.context > 1:
        return parallel.context
    needed = -(-config.data.seq_len // parallel.tokens_per_rank)
    return -(-needed // parallel.ulysses) * parallel.ulysses


@dataclass(frozen=True, kw_only=True)
class RankKind:
    """Rank that represents all ranks with the same kind of work."""

    rank: int
    names: tuple[str, ...]
    """Roles, such as first in its ring or last in its expert group."""

    def describe(self) -> str:
        """Return one line for the report."""
        roles = ", ".join(self.names)
        if not roles:
            return f"rank {self.rank}"
        return f"rank {self.rank} ({roles})"


def rank_kinds(config: RunConfig) -> list[RankKind]:
    """Return the ranks to estimate: first, middle and last in the first ring, last in its Ulysses group, and first and
    last in the first expert group.
    """
    parallel = config.parallel
    # A rank may have several roles, but is traced only once.
    ring = parallel.context // parallel.ulysses
    names: dict[int, list[str]] = {0: []}
    if ring > 1:
        for place, ring_rank in (("first", 0), ("middle", ring // 2), ("last", ring - 1)):
            names.setdefault(ring_rank * parallel.ulysses, []).append(f"{place} ring rank")
    if parallel.ulysses > 1:
        # If heads do not divide evenly, the last rank has fewer.
        names.setdefault(parallel.ulysses - 1, []).append("last rank in the Ulysses group")
    if parallel.expert > 1:
        names[0].append("first rank in the expert group")
        names.setdefault(parallel.expert - 1, []).append("last rank in the expert group")
    return [RankKind(rank=rank, names=tuple(names[rank])) for rank in sorted(names)]
