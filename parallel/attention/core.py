"""ContextParallelAttention: the core that layers call."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import Scores
from longctx.kernels.graphs import outside_graphs
from longctx.kernels.processor import Products
from longctx.model.attention.core import KVCache
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache
from parallel.attention.softmax import attend
from parallel.layout.cached import cached_layout
from parallel.mesh import Mesh
from parallel.schedule.schedule import Schedule


@dataclass(frozen=True)
class ContextParallelAttention:
    """The attention core of a layer whose sequence is shared by the mesh's context ranks."""

    mesh: Mesh
    layout: str
    kernel: str = "auto"
    transport: str = "auto"
    communication_dtype: torch.dtype | None = None
    deterministic: bool = False
    products: Products | None = None
    """How a CPU multiplies bfloat16; None takes what is faster on this one."""

    @outside_graphs("keys, values and states travel between ranks")
    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        mask: AttentionMask,
        layer: int,
        cache: KVCache | None = None,
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        if cache is not None:
            raise ConfigError("decoding with keys spread over ranks is not built yet; generate in one process.")
        return attend(
            q_BtHD,
            k_BtKD,
            v_BtKV,
            schedule=build_schedule(self.layout, self.mesh.context, self.mesh.ulysses, mask),
            mesh=self.mesh,
            kernel=self.kernel,
            scores=scores,
            sinks_H=sinks_H,
            transport=self.transport,
            communication_dtype=self.communication_dtype,
            deterministic=self.deterministic,
            products=self.products,
            recompute_cache=recompute_cache,
            agree_again=layer == 0,  # once a micro-batch, whatever a rank has met before
        )


@lru_cache(maxsize=8)
def build_schedule(kind: str, degree: int, ulysses: int, mask: AttentionMask) -> Schedule:
    """The schedule of a mask, built once a batch and shared by all layers of that mask."""
    layout = cached_layout(kind, degree, ulysses, mask.documents)
    return Schedule.build(layout, mask.documents, mask.causal, mask.window, mask.sink_tokens, stride=mask.stride)
