"""The gated delta rule over a sequence that is spread over ranks: segments of documents are joined, no row moves.

A rank computes its own segments; what enters them comes from ``JoinSegments``. What a document's first segment gives
needs nothing of others, and its last gives nothing: with a contiguous layout no rank computes a state twice.

Axes: B batch, t this rank's tokens, K key heads, D key head size, X channels of values, decay and β of a key head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import Scores
from longctx.kernels.devices import on_cpu
from longctx.kernels.gated_delta.front import Weights
from longctx.kernels.gated_delta.rule import Options, gated_delta
from longctx.kernels.linear_attention import Segments
from longctx.model.attention.cache import LayerCache
from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.mask import AttentionMask
from longctx.model.mixers.gated_delta import as_tokens
from longctx.model.recompute import RecomputeCache
from parallel.attention.agreement import agree, degree_problem
from parallel.attention.cached_delta import CachedDeltaPlan
from parallel.attention.join_segments import JoinSegments
from parallel.attention.plan import CoreOverRanks, build_layout, flattened, tokens_problem
from parallel.mesh import Mesh
from parallel.schedule.states import StatePlan


@dataclass(frozen=True, eq=False)
class DeltaPlan:
    """Which segments of a batch meet, in every gated delta layer of one forward pass."""

    mesh: Mesh
    states: StatePlan
    shapes: AttentionShapes
    segments: Segments

    @classmethod
    def build(cls, states: StatePlan, mesh: Mesh, shapes: AttentionShapes) -> DeltaPlan:
        """Return the plan for these shapes. Collective.

        ConfigError on every rank if one has a problem, ClusterError if ranks differ or one is too late.
        """
        problem = degree_problem(states.layout, mesh)
        if problem is None:
            num_local = states.layout.num_local(mesh.context_rank)
            shapes = flattened(shapes, num_local)
            problem = tokens_problem(shapes, num_local, mesh)
        heads = f"{shapes.num_kv_heads} key heads of {shapes.head_dim} (values {shapes.value_dim})"
        agree(states, mesh, f"gated delta rule, {shapes.batch} × {heads}, {shapes.dtype}", problem)
        return cls(mesh, states, shapes, states.segments(mesh.context_rank))

    @property
    def exchange(self) -> JoinSegments | None:
        """The exchange of a layer; None if no document is on several ranks."""
        if self.mesh.context == 1 or not self.states.num_given:
            return None
        return JoinSegments(self.mesh, self.states)


class ContextParallelGatedDelta(CoreOverRanks):
    """The core of gated delta layers; none of the options changes it.

    Ranks that split heads in other layers (``parallel.ulysses``) hold rows of their own here as any others do.
    """

    @staticmethod
    def check_layout(layout: str, ring_degree: int) -> None:
        """ConfigError if single tokens are dealt to several ranks: every token would be a segment of its own."""
        if layout == "striped" and ring_degree > 1:
            raise ConfigError(
                "parallel.layout='striped' deals single tokens to ranks, and gated delta layers (model.layers) pass a "
                "state from token to token.\nTry parallel.layout='contiguous' (or zigzag or balanced)."
            )

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> DeltaPlan | CachedDeltaPlan:
        """Return the segments of the mask's documents or of a cache's chunk, on which the ranks agree. Collective."""
        if shapes.cached_tokens is not None:
            return CachedDeltaPlan.build(mask, shapes, placement, self.mesh)
        layout = placement or build_layout(self.layout, self.mesh, mask)
        return DeltaPlan.build(StatePlan.build(layout, mask.documents), self.mesh, shapes)

    def __call__(
        self,
        q_BtKD: Tensor,
        k_BtKD: Tensor,
        v_BtKX: Tensor,
        *,
        plan: DeltaPlan | CachedDeltaPlan,
        cache: LayerCache | None = None,
        scores: Scores | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Return the output [B, t, K, G·V] of this rank's tokens, equal to one process's but for rounding."""
        B, t, K = q_BtKD.shape[:3]
        batch, given = plan.shapes.batch, Weights._make(weights)
        if isinstance(plan, CachedDeltaPlan):
            assert cache is not None, "the plan of a cached chunk came without the layer's cache"
            return plan.attend(q_BtKD, k_BtKD, v_BtKX, given, cache)
        q, k, v = (x.reshape(batch, -1, *x.shape[2:]) for x in (q_BtKD, k_BtKD, v_BtKX))
        plan.shapes.check_call(q, None)
        groups = 1
        # A rank waits for the state of the one before it: head by head, it waits for the first head alone. A GPU takes
        # all heads at once in the time of one.
        if plan.exchange is not None and on_cpu(q):
            groups = K
        kept = _ByGroup(recompute_cache, groups)
        parts = zip(*(x.chunk(groups, 2) for x in (q, k, v)), *(x.chunk(groups) for x in given), strict=True)
        outs = []
        for group, (q_h, k_h, v_h, *weights_h) in enumerate(parts):
            options = Options(
                segments=plan.segments,
                beta_scale=plan.shapes.beta_scale,
                exchange=plan.exchange,
                saved=kept.of_group(group),
            )
            of_group = Weights._make(weights_h)
            outs.append(gated_delta(as_tokens(q_h, k_h, v_h, of_group), of_group, options)[0])
        kept.finish()
        return torch.cat(outs, 2).view(B, t, K, -1)


class _ByGroup:
    """The results of groups of heads, which a recompute cache has as one layer's."""

    def __init__(self, cache: RecomputeCache | None, groups: int) -> None:
        self._cache, self._results = cache, [()] * groups
        self._known: tuple[Tensor, ...] | None = None
        if cache is not None:
            self._known = cache.load()

    def of_group(self, group: int) -> _OneGroup | None:
        """What one group's call keeps its results by; None if nothing is kept."""
        if self._cache is None:
            return None
        known = None
        if self._known is not None:
            count = len(self._known) // len(self._results)
            known = self._known[group * count : (group + 1) * count]
        return _OneGroup(self._results, group, known)

    def finish(self) -> None:
        """Hand the results of all groups to the cache."""
        if self._cache is not None and self._known is None:
            self._cache.save(*chain.from_iterable(self._results))


@dataclass(frozen=True)
class _OneGroup:
    """One group's part (``longctx.kernels.gated_delta.rule.Saved``)."""

    results: list[tuple[Tensor, ...]]
    group: int
    known: tuple[Tensor, ...] | None

    def load(self) -> tuple[Tensor, ...] | None:
        return self.known

    def save(self, *tensors: Tensor) -> None:
        self.results[self.group] = tensors
