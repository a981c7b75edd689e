"""ContextParallelAttention: the softmax core that layers call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import Scores
from longctx.model.attention.cache import LayerCache
from longctx.model.attention.core import AttentionShapes, EachAlone, sinks_of
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache
from parallel.attention.cached import CachedPlan, attend_cached, attend_cached_each
from parallel.attention.plan import ContextParallelPlan, CoreOverRanks, build_layout
from parallel.attention.softmax import attend_planned
from parallel.schedule.schedule import Schedule


class ContextParallelAttention(CoreOverRanks):
    """Softmax attention core over ranks. It supports every layout."""

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> ContextParallelPlan | CachedPlan:
        """Build the mask's schedule, and check that all ranks have the same one. Collective.

        ``placement`` is the layout by which the batch was split; by default, one of this core's kind is built. With a
        cache it is the chunk's ``ChunkPlacement``. ``key_placement`` is the layout for keys in cross attention.
        """
        if shapes.cached_tokens is not None:
            return CachedPlan.build(mask, shapes, placement, self.mesh, self.options)
        layout = placement or build_layout(self.layout, self.mesh, mask)
        if mask.key_documents is not None and key_placement is None:
            raise ConfigError("cross attention over ranks needs the layout of its keys (key_placement).")
        schedule = Schedule.build(
            layout,
            mask.documents,
            mask.causal,
            mask.window,
            mask.sink_tokens,
            key_layout=key_placement,
            stride=mask.stride,
            key_documents=mask.key_documents,
        )
        return ContextParallelPlan.build(schedule, self.mesh, shapes, self.options)

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: ContextParallelPlan | CachedPlan,
        cache: LayerCache | None = None,
        scores: Scores | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        if isinstance(plan, CachedPlan):
            assert cache is not None, "the plan of a cached chunk came without the layer's cache"
            return attend_cached(q_BtHD, k_BtKD, v_BtKV, plan, cache, scores=scores, sinks_H=sinks_of(weights))
        return attend_planned(
            q_BtHD, k_BtKD, v_BtKV, plan, scores=scores, sinks_H=sinks_of(weights), recompute_cache=recompute_cache
        )

    def attend_each(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: EachAlone,
        caches: Sequence[LayerCache],
        scores: Scores | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return each sequence's output [1, t, H, V] over its own cache, on all ranks. Collective."""
        if all(of_one.is_replicated for of_one in plan.plans):
            return attend_cached_each(q_BtHD, k_BtKD, v_BtKV, plan, caches, scores=scores, sinks_H=sinks_of(weights))
        return super().attend_each(q_BtHD, k_BtKD, v_BtKV, plan=plan, caches=caches, scores=scores, weights=weights)
