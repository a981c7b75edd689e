"""ContextParallelAttention: the core that layers call."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import Scores
from longctx.kernels.graphs import outside_graphs
from longctx.model.attention.core import AttentionShapes, LayerCache
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache
from parallel.attention.plan import AttentionOptions, ContextParallelPlan, build_layout
from parallel.attention.softmax import attend_planned
from parallel.layout.sequence import SequenceLayout
from parallel.mesh import Mesh
from parallel.schedule.schedule import Schedule


@dataclass(frozen=True)
class ContextParallelAttention:
    """The attention core of a layer whose sequence is shared by the mesh's context ranks."""

    mesh: Mesh
    layout: str
    """Kind of layout in which attention has the tokens."""
    options: AttentionOptions = field(default_factory=AttentionOptions)

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: SequenceLayout | None = None
    ) -> ContextParallelPlan:
        """The schedule of the mask, and the ranks' agreement on it. Collective.

        ``placement`` is the layout that the batch was split by; without one it is this core's.
        """
        if shapes.cached_tokens is not None:
            raise ConfigError("decoding with keys spread over ranks is not built yet; generate in one process.")
        layout = placement
        if layout is None or layout.kind != self.layout:
            layout = build_layout(self.layout, self.mesh, mask.documents)
        schedule = Schedule.build(
            layout, mask.documents, mask.causal, mask.window, mask.sink_tokens, stride=mask.stride
        )
        return ContextParallelPlan.build(schedule, self.mesh, shapes, self.options, placement=placement)

    @outside_graphs  # keys, values and states travel between ranks
    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: ContextParallelPlan,
        cache: LayerCache | None = None,
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        return attend_planned(
            q_BtHD, k_BtKD, v_BtKV, plan, scores=scores, sinks_H=sinks_H, recompute_cache=recompute_cache
        )
