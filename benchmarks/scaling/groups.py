"""Process groups, and the counts exchanged for experts, with torch's fake process group: a world in one process."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.scaling.attention import NODE, packed_documents
from benchmarks.scaling.figures import Figures, timed
from longctx.config import PRESETS
from parallel.comm import process_groups
from parallel.experts.dispatcher import AllToAllDispatcher
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.document_segments import shared_documents

CONTEXT = 64
"""Ranks for a sequence of a million tokens, in a typical choice: Ulysses in the node, a ring between eight nodes."""
EXPERT = 64


def measure(figures: Figures, ranks: int) -> None:
    """Measure the mesh of a world with this many ranks: context 64, Ulysses 8, experts over 64, the rest data."""
    dist.init_process_group("fake", rank=ranks // 2, world_size=ranks, store=FakeStore())
    new_group, created = dist.new_group, []

    def counting(members: list[int], **options: Any) -> Any:
        # CPU groups have a named backend, which a fake world cannot have.
        group = new_group(members, **{**options, "backend": "fake"})
        created.append(len(members))
        return group

    degrees: dict[str, Any] = {
        "context": min(CONTEXT, ranks),
        "ulysses": min(NODE, ranks),
        "expert": min(EXPERT, ranks),
    }
    with (
        patch.object(dist, "new_group", counting),
        patch.object(process_groups, "world_timeout", lambda: timedelta(minutes=1)),
    ):
        _, seconds = timed(lambda: Mesh.build(**degrees, ranks_per_node=NODE))
    dist.destroy_process_group()
    case = f"context {CONTEXT}, Ulysses {NODE}, experts over {EXPERT}"
    figures.add("groups that a rank makes", case, ranks, len(created), needed="own groups", power=0.0)
    figures.add("members of its largest group", case, ranks, max(created), needed="degrees", power=0.0)
    figures.add("making groups, no network", case, ranks, seconds, unit="s", needed="ranks", power=1.0)


def measure_experts(figures: Figures, ranks: int, num_tokens: int, model: str) -> None:
    """Measure a MoE layer's messages to other ranks except the tokens, on one rank, for packed documents."""
    config = PRESETS[model]
    degree = min(EXPERT, ranks)
    mesh = Mesh(rank=0, world_size=ranks, context=ranks, expert=degree)
    dispatcher = AllToAllDispatcher(mesh, config.num_experts)
    experts_Nk = torch.randint(config.num_experts, (max(1, num_tokens // ranks), config.experts_per_token))
    # Once before: an operation's first call is slower.
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
    # Ids and token index, int32, for every token in the sequence.
    figures.add(
        "capacity, gathered a layer",
        f"{model}, model.capacity_factor set",
        ranks,
        4 * num_tokens * (config.experts_per_token + 1),
        unit="B",
        needed="experts × ranks",
        power=1.0,
        why="each rank gathers every token's choice; counts per rank's token span would do",
    )
