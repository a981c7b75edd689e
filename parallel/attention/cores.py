"""Attention cores over ranks, by the names that mixers use (``longctx/architecture/mixers``)."""

from __future__ import annotations

from longctx.model.attention.core import AttentionCore
from parallel.attention.context_parallel_core import ContextParallelAttention
from parallel.attention.context_parallel_gated_delta import ContextParallelGatedDelta
from parallel.attention.context_parallel_image_windows import ContextParallelImageWindows
from parallel.attention.context_parallel_linear import ContextParallelLinearAttention
from parallel.attention.context_parallel_plan import ContextParallelOptions, CoreOverRanks
from parallel.mesh import Mesh

CORES: dict[str, type[CoreOverRanks]] = {
    "softmax": ContextParallelAttention,
    "linear": ContextParallelLinearAttention,
    "gated_delta": ContextParallelGatedDelta,
    "image_windows": ContextParallelImageWindows,
}


def build_cores(mesh: Mesh, layout: str, options: ContextParallelOptions) -> dict[str, AttentionCore]:
    """Build all the mesh's cores, including those that the model does not use."""
    return {name: kind(mesh, layout, options) for name, kind in CORES.items()}
