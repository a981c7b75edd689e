"""Linear attention over a sequence that is spread over ranks: one all-gather of states, whatever the length (LASP-2).

A rank sends, for each document that goes on elsewhere, the sum over its own keys (arXiv 2502.07563): a matrix a key
head, not rows. They travel while the rank works on its own rows. Backward is the mirror image: gradients of the states
that were taken are gathered, and each segment adds those of its document's later segments.

Axes: B batch, t this rank's tokens, H query heads, K key/value heads, D query/key head size, V value head size,
W = V + 1, s states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import Scores
from longctx.kernels.linear_attention import CHUNK, Segments, StateExchange, linear_attention
from longctx.model.attention.cache import LayerCache
from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.mask import AttentionMask
from longctx.model.recompute import RecomputeCache
from parallel.attention.agreement import agree, degree_problem
from parallel.attention.cached_linear import CachedLinearPlan, linear_attend_cached
from parallel.attention.gather_states import GatherStates
from parallel.attention.plan import CoreOverRanks, build_layout, flattened, tokens_problem
from parallel.mesh import Mesh
from parallel.schedule.states import StatePlan


@dataclass(frozen=True, eq=False)
class ContextParallelLinearPlan:
    """Which states of a batch travel, and this rank's segments, in every linear layer of one forward pass."""

    mesh: Mesh
    """The ranks that share this batch's sequence."""
    states: StatePlan
    """Its layout is where the batch's tokens are: no row leaves its rank."""
    shapes: AttentionShapes
    """Of this rank's shard: rows of a flattened micro-batch count as the one sequence that the layout is over."""
    segments: Segments

    @classmethod
    def build(cls, states: StatePlan, mesh: Mesh, shapes: AttentionShapes) -> ContextParallelLinearPlan:
        """The plan for these shapes. Collective.

        ConfigError on every rank where one has a problem, ClusterError where ranks differ or one is too late.
        """
        problem = degree_problem(states.layout, mesh)
        if problem is None:
            num_local = states.layout.num_local(mesh.context_rank)
            shapes = flattened(shapes, num_local)
            problem = tokens_problem(shapes, num_local, mesh)
        heads = f"{shapes.num_heads}/{shapes.num_kv_heads} heads of {shapes.head_dim} (values {shapes.value_dim})"
        agree(states, mesh, f"linear attention, {shapes.batch} × {heads}, {shapes.dtype}", problem)
        return cls(mesh, states, shapes, states.segments(mesh.context_rank))

    def exchange(self, recompute_cache: RecomputeCache | None) -> StateExchange | None:
        """How states travel in one layer; None where no document lies on several ranks."""
        if not self.states.num_given:
            return None
        exchange = GatherStates(self.mesh, self.states)
        if recompute_cache is None:
            return exchange
        return _Recomputed(exchange, recompute_cache)


def linear_attend_planned(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: ContextParallelLinearPlan,
    *,
    chunk: int = CHUNK,
    recompute_cache: RecomputeCache | None = None,
) -> Tensor:
    """Linear attention (feature map elu + 1) of this rank's queries over the keys of their documents on all ranks.

    Inputs are this rank's shard under the plan's layout: [1, t, …] of it, the same tokens in B rows when the layout is
    over flattened rows, or B stacked sequences of the same documents. Returns [B, t, H, V] in q's dtype, equal to one
    process's result but for rounding, the same bits every time. A ``recompute_cache`` keeps the states that entered
    this rank's segments: recomputing the layer sends nothing.
    """
    B, t = q_BtHD.shape[:2]
    # The layout is over one sequence, so rows of a micro-batch that it was flattened from are laid end to end.
    batch = plan.shapes.batch
    q, k, v = (x.reshape(batch, -1, x.shape[2], x.shape[3]) for x in (q_BtHD, k_BtKD, v_BtKV))
    plan.shapes.check_call(q, None)
    out, _ = linear_attention(
        q,
        k,
        v,
        segments=plan.segments,
        causal=plan.states.causal,
        exchange=plan.exchange(recompute_cache),
        chunk=chunk,
    )
    return out.view(B, t, out.shape[2], out.shape[3])


class ContextParallelLinearAttention(CoreOverRanks):
    """The core of linear attention; none of the options changes it.

    Ranks that split heads in other layers (``parallel.ulysses``) hold rows of their own here as any others do: states
    are so small that trading rows for heads would only add to what travels.
    """

    @staticmethod
    def check_layout(layout: str, ring_degree: int) -> None:
        """ConfigError if single tokens are dealt to several ranks: states are sums over runs of neighbours."""
        if layout == "striped" and ring_degree > 1:
            raise ConfigError(
                "parallel.layout='striped' deals single tokens to ranks, and linear layers (model.layers) sum over "
                "runs of neighbours.\nTry parallel.layout='zigzag' (or contiguous or balanced)."
            )

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> ContextParallelLinearPlan | CachedLinearPlan:
        """The states of the mask's documents or of a cache's chunk, and the ranks' agreement on them. Collective."""
        if shapes.cached_tokens is not None:
            return CachedLinearPlan.build(mask, shapes, placement, self.mesh)
        layout = placement or build_layout(self.layout, self.mesh, mask)
        states = StatePlan.build(layout, mask.documents, causal=mask.causal)
        return ContextParallelLinearPlan.build(states, self.mesh, shapes)

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: ContextParallelLinearPlan | CachedLinearPlan,
        cache: LayerCache | None = None,
        scores: Scores | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Output [B, t, H, V]; ``scores`` and ``weights`` are those of softmax."""
        if isinstance(plan, CachedLinearPlan):
            assert cache is not None, "the plan of a cached chunk came without the layer's cache"
            return linear_attend_cached(q_BtHD, k_BtKD, v_BtKV, plan, cache)
        return linear_attend_planned(q_BtHD, k_BtKD, v_BtKV, plan, recompute_cache=recompute_cache)


@dataclass(frozen=True)
class _Recomputed:
    """An exchange whose first result is saved, and is the result when the layer is computed again."""

    exchange: StateExchange
    recompute_cache: RecomputeCache

    def carry(self, given_sBKDW: Tensor) -> Callable[[], Tensor]:
        known = self.recompute_cache.load()
        if known is not None:
            return lambda: known[0]
        arriving = self.exchange.carry(given_sBKDW)

        def finish() -> Tensor:
            taken = arriving()
            self.recompute_cache.save(taken)
            return taken

        return finish

    def carry_back(self, dtaken_sBKDW: Tensor) -> Callable[[], Tensor]:
        return self.exchange.carry_back(dtaken_sBKDW)
