"""Process groups, and the counts that experts exchange, with torch's fake process group: a world of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scaling.attention import NODE
from benchmarks.scaling.figures import Figures, timed
from longctx.config import PRESETS
from parallel.experts.dispatcher import AllToAllDispatcher
from parallel.mesh import Mesh

CONTEXT = 64
"""Ranks of a sequence of a million tokens, as they would be chosen: Ulysses in the node, a ring between eight nodes."""
EXPERT = 64


def measure(figures: Figures, ranks: int) -> None:
    """The mesh of a world of so many ranks: context 64, Ulysses 8, experts over 64, the rest data."""
    dist.init_process_group("fake", rank=ranks // 2, world_size=ranks, store=FakeStore())
    new_group, created = dist.new_group, []

    def counting(*arguments: Any, **options: Any) -> Any:
        # Beside a GPU's groups there are some for the CPU, by a backend that needs the others.
        group = new_group(*arguments, **{**options, "backend": "fake"})
        created.append(group)
        return group

    dist.new_group = counting
    try:
        degrees = {"context": min(CONTEXT, ranks), "ulysses": min(NODE, ranks), "expert": min(EXPERT, ranks)}
        _, seconds = timed(lambda: Mesh.build(**degrees, ranks_per_node=NODE))
    finally:
        dist.new_group = new_group
        dist.destroy_process_group()
    case = f"context {CONTEXT}, Ulysses {NODE}, experts over {EXPERT}"
    entered = sum(group != dist.GroupMember.NON_GROUP_MEMBER for group in created)
    why = "torch's new_group is called by all ranks for every group, also for those of others"
    figures.add("groups that a rank creates", case, ranks, len(created), needed="own groups", power=0.0, why=why)
    figures.add("groups that a rank is in", case, ranks, entered, needed="own groups", power=0.0)
    figures.add("creating groups, no network", case, ranks, seconds, unit="s", needed="own groups", power=0.0, why=why)


def measure_experts(figures: Figures, ranks: int, num_tokens: int, model: str) -> None:
    """A layer's dispatch on one rank, balance counts by document, and the choices that a capacity gathers."""
    config = PRESETS[model]
    if not config.num_experts:
        return
    local = max(1, num_tokens // ranks)
    degree = min(EXPERT, ranks)
    mesh = Mesh(rank=0, world_size=ranks, context=min(CONTEXT, ranks), expert=degree)
    dispatcher = AllToAllDispatcher(mesh, config.num_experts)
    experts_Nk = torch.randint(config.num_experts, (local, config.experts_per_token), dtype=torch.int64)
    _, seconds = timed(lambda: dispatcher._counts(experts_Nk))
    case = f"{model}, experts over {EXPERT}"
    figures.add("experts' send counts of a tile", case, ranks, 16 * degree, unit="B", needed="degree", power=0.0)
    figures.add("counting them", case, ranks, seconds, unit="s", needed="tokens a rank", power=-1.0)
