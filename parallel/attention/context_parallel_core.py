"""ContextParallelAttention: the softmax core that layers call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import AttentionShapes, SeparatePlans, sinks_of
from longctx.model.attention.kv_cache import LayerCache
from longctx.model.attention.local import LocalAttention, LocalPlan
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache
from parallel.attention.cached_attention import CachedPlan, attention_with_cache, attention_with_caches
from parallel.attention.context_parallel_plan import ContextParallelPlan, CoreOverRanks, build_sequence_layout
from parallel.attention.context_parallel_softmax import planned_attention
from parallel.schedule.attention_schedule import Schedule


class ContextParallelAttention(CoreOverRanks):
    """Softmax attention core over ranks. It supports every layout."""

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> ContextParallelPlan | CachedPlan | LocalPlan:
        """Build the mask's schedule, and check that all ranks have the same one. Collective.

        ``placement`` is the layout by which the batch was split; by default, one of this core's kind is built. With a
        cache it is the chunk's ``ChunkPlacement``. ``key_placement`` is the layout for keys in cross attention.
        """
        if shapes.cached_tokens is not None:
            return CachedPlan.build(mask, shapes, placement, self.mesh, self.options)
        if mask.documents.prefixes and self.mesh.context == 1:
            # Schedules have no prefixes: a prefix would have to be sent to its replies' ranks.
            return self._alone.plan(mask, shapes)
        layout = placement or build_sequence_layout(self.layout, self.mesh, mask)
        if mask.key_documents is not None and key_placement is None:
            raise ConfigError("cross attention over ranks needs its keys' layout (key_placement).")
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
        plan: ContextParallelPlan | CachedPlan | LocalPlan,
        cache: LayerCache | None = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        if isinstance(plan, LocalPlan):
            return self._alone(
                q_BtHD, k_BtKD, v_BtKV, plan=plan, scores=scores, weights=weights, recompute_cache=recompute_cache
            )
        if isinstance(plan, CachedPlan):
            assert cache is not None, "a cached chunk's plan without the layer's cache"
            return attention_with_cache(q_BtHD, k_BtKD, v_BtKV, plan, cache, scores=scores, sinks_H=sinks_of(weights))
        return planned_attention(
            q_BtHD, k_BtKD, v_BtKV, plan, scores=scores, sinks_H=sinks_of(weights), recompute_cache=recompute_cache
        )

    @property
    def _alone(self) -> LocalAttention:
        """Core of a rank that holds every key."""
        return LocalAttention(self.options.kernel, matmul_mode=self.options.matmul_mode)

    def forward_sequences(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: SeparatePlans,
        caches: Sequence[LayerCache],
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
    ) -> Tensor:
        """Return each sequence's output [1, t, H, V] over its own cache, on all ranks. Collective."""
        if all(of_one.is_replicated for of_one in plan.plans):
            return attention_with_caches(q_BtHD, k_BtKD, v_BtKV, plan, caches, scores=scores, sinks_H=sinks_of(weights))
        return super().forward_sequences(
            q_BtHD, k_BtKD, v_BtKV, plan=plan, caches=caches, scores=scores, weights=weights
        )
