"""Process groups, and the counts that experts exchange, with torch's fake process group: a world of one process."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scaling.attention import NODE, packed_documents
from benchmarks.scaling.figures import Figures, timed
from longctx.config import PRESETS
from parallel.experts.dispatcher import AllToAllDispatcher
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.segments import shared_documents

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
    """What a layer of experts tells other ranks beside the tokens themselves, on one rank, for packed documents."""
    config = PRESETS[model]
    degree = min(EXPERT, ranks)
    mesh = Mesh(rank=0, world_size=ranks, context=ranks, expert=degree)
    dispatcher = AllToAllDispatcher(mesh, config.num_experts)
    experts_Nk = torch.randint(config.num_experts, (max(1, num_tokens // ranks), config.experts_per_token))
    # Once before: the first call of an operation is slower.
    dispatcher._counts(experts_Nk)
    _, seconds = timed(lambda: dispatcher._counts(experts_Nk))
    case = f"{model}, experts over {EXPERT}"
    own = {"needed": "tokens a rank", "power": -1.0}
    figures.add("experts: counting what is sent", case, ranks, seconds, unit="s", **own)
    figures.add("experts: send counts, a tile", case, ranks, 16 * degree, unit="B", needed="expert degree", power=0.0)

    documents = packed_documents(num_tokens)
    layout = SequenceLayout.build("balanced", num_tokens, ranks, documents)
    shared, seconds = timed(lambda: shared_documents(layout, documents.bounds))
    num_layers = sum(config.has_experts(layer) for layer in range(config.num_layers))
    case = f"{model}, {len(documents.bounds) - 1} documents"
    words = {"needed": "shared documents", "power": 0.0}
    figures.add(
        "balance by document, all-reduced",
        case,
        ranks,
        4 * num_layers * len(shared) * config.num_experts,
        unit="B",
        **words,
    )
    figures.add("finding shared documents", case, ranks, seconds, unit="s", needed="ranks", power=1.0)
    # Ids and a token's index, int32, of every token of the sequence.
    figures.add(
        "capacity, gathered a layer",
        f"{model}, model.capacity_factor set",
        ranks,
        4 * num_tokens * (config.experts_per_token + 1),
        unit="B",
        needed="experts × ranks",
        power=1.0,
        why="each rank gathers every token's choice; counts of each rank's runs would do",
    )
