"""The cores over ranks, by the names that mixers give (``longctx/architecture/mixers``)."""

from __future__ import annotations

from longctx.model.attention.core import AttentionCore
from parallel.attention.core import ContextParallelAttention
from parallel.attention.linear import ContextParallelLinearAttention
from parallel.attention.plan import AttentionOptions
from parallel.mesh import Mesh

CORES: dict[str, type[ContextParallelAttention | ContextParallelLinearAttention]] = {
    "softmax": ContextParallelAttention,
    "linear": ContextParallelLinearAttention,
}


def build_cores(mesh: Mesh, layout: str, options: AttentionOptions) -> dict[str, AttentionCore]:
    """All cores of a mesh: which of them a model has is its own affair."""
    return {name: kind(mesh, layout, options) for name, kind in CORES.items()}
