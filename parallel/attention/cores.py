"""The cores over ranks, by the names that mixers give (``longctx/architecture/mixers``)."""

from __future__ import annotations

from typing import Protocol

from longctx.model.attention.core import AttentionCore
from parallel.attention.core import ContextParallelAttention
from parallel.attention.linear import ContextParallelLinearAttention
from parallel.attention.plan import AttentionOptions
from parallel.mesh import Mesh


class CoreKind(Protocol):
    """A class of cores."""

    @staticmethod
    def check_layout(layout: str, ring_degree: int) -> None:
        """ConfigError if the core cannot have a sequence that so many ring ranks hold in this layout."""
        ...

    @classmethod
    def build(cls, mesh: Mesh, layout: str, options: AttentionOptions) -> AttentionCore:
        """The core of a mesh, for batches that lie in this layout unless they name another one."""
        ...


CORES: dict[str, type[CoreKind]] = {"softmax": ContextParallelAttention, "linear": ContextParallelLinearAttention}


def build_cores(mesh: Mesh, layout: str, options: AttentionOptions) -> dict[str, AttentionCore]:
    """All cores of a mesh: which of them a model has is its own affair."""
    return {name: kind.build(mesh, layout, options) for name, kind in CORES.items()}
