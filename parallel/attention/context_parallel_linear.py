"""Linear attention over a sharded sequence: one all-gather of states, independent of the sequence length (LASP-2).

For each document that continues on another rank, a rank sends the sum over its own keys (arXiv 2502.07563): one matrix
per key head instead of rows, transferred while the rank computes on its own rows. Backward mirrors this: the received
states' gradients are gathered, and each segment sums those from later segments in its document.

With a cache, every rank has the state after all tokens before a chunk. Every rank adds the chunk's sums to it, in one
order, so that states stay bitwise equal; single tokens send nothing.

Axes: B batch, t this rank's tokens, H query heads, K key/value heads, D query/key head size, V value head size, W = V +
1, s states.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.linear_attention import CHUNK, StateExchange, linear_attention
from longctx.model.attention.core import check_no_gradient
from longctx.model.attention.kv_cache import LayerCache
from longctx.model.recompute import RecomputeCache
from parallel.attention.gather_states import GatherStates
from parallel.attention.state_plans import CoreOfStates, StatesOfBatch, StatesOfChunk, no_backward


class ContextParallelLinearAttention(CoreOfStates):
    """Linear attention core over ranks."""

    layer_kind: ClassVar[str] = "linear attention"
    why_not_striped: ClassVar[str] = "linear layers (model.layers) sum over consecutive tokens"

    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        plan: StatesOfBatch | StatesOfChunk,
        cache: LayerCache | None = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Return the output [B, t, H, V]; ``scores`` and ``weights``, meant for softmax, are ignored."""
        if isinstance(plan, StatesOfChunk):
            assert cache is not None, "a cached chunk's plan without the layer's cache"
            return linear_attention_with_cache(q_BtHD, k_BtKD, v_BtKV, plan, cache)
        return planned_linear_attention(q_BtHD, k_BtKD, v_BtKV, plan, recompute_cache=recompute_cache)


def planned_linear_attention(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    plan: StatesOfBatch,
    *,
    chunk: int = CHUNK,
    recompute_cache: RecomputeCache | None = None,
) -> Tensor:
    """Compute linear attention (feature map elu + 1) for local queries over their documents' keys on all ranks.

    Inputs are this rank's shard under the plan's layout: [1, t, …], the same tokens in B rows if the layout is over
    flattened rows, or B stacked sequences with the same documents. Return [B, t, H, V] in q's dtype, equal to a single
    process up to rounding, and bitwise reproducible. A ``recompute_cache`` keeps the received states, so that
    recomputing the layer sends nothing.
    """
    B, t = q_BtHD.shape[:2]
    # The layout covers one sequence, so a flattened micro-batch's rows are concatenated.
    batch = plan.shapes.batch
    q, k, v = (x.reshape(batch, -1, x.shape[2], x.shape[3]) for x in (q_BtHD, k_BtKD, v_BtKV))
    plan.shapes.check_call(q, None)
    exchange: StateExchange | None = None
    # If no document spans ranks, no state is sent.
    if plan.states.num_given:
        exchange = GatherStates(plan.mesh, plan.states)
        # Outermost, so that recomputation takes the saved states before a gather starts.
        if recompute_cache is not None:
            exchange = _Recomputed(exchange, recompute_cache)
    out, _ = linear_attention(
        q, k, v, segments=plan.segments, causal=plan.states.causal, exchange=exchange, chunk=chunk
    )
    return out.view(B, t, out.shape[2], out.shape[3])


def linear_attention_with_cache(
    q_BtHD: Tensor, k_BtKD: Tensor, v_BtKV: Tensor, plan: StatesOfChunk, cache: LayerCache
) -> Tensor:
    """Return the output [B, t, H, V] for new tokens; add their sums to the cached state. Collective; no backward."""
    plan.shapes.check_call(q_BtHD, None)
    check_no_gradient(q_BtHD)
    segments = plan.segments
    # Every rank has all tokens and the state before them, so each computes the same new state locally.
    if plan.states is None:
        out, state = linear_attention(q_BtHD, k_BtKD, v_BtKV, segments=segments, initial_states_sBKDW=cache.state)
        cache.add_state(state, plan.num_tokens)
        return out
    exchange = _AfterState(GatherStates(plan.mesh, plan.states), cache)
    out, _ = linear_attention(q_BtHD, k_BtKD, v_BtKV, segments=segments, exchange=exchange)
    cache.add_state(exchange.of_chunk, plan.num_tokens)
    return out


class _AfterState:
    """Exchange that adds the state before the chunk to every segment's initial state."""

    def __init__(self, exchange: GatherStates, cache: LayerCache) -> None:
        self.exchange, self.cache = exchange, cache
        self.of_chunk: Tensor
        """Sum over the chunk's keys on all ranks, [1, B, K, D, W]; set once the states are received."""

    def carry(self, sent_sBKDW: Tensor) -> Callable[[], Tensor]:
        pending, before = self.exchange.carry(sent_sBKDW), self.cache.state

        def finish() -> Tensor:
            sums = pending()
            taken, self.of_chunk = sums[:-1], sums[-1:]
            if before is not None:
                taken = taken + before
            return taken

        return finish

    def carry_back(self, grad_received_sBKDW: Tensor) -> Callable[[], Tensor]:
        return no_backward(grad_received_sBKDW)


@dataclass(frozen=True)
class _Recomputed:
    """Exchange that saves its first result, and returns it when the layer is recomputed."""

    exchange: StateExchange
    recompute_cache: RecomputeCache

    def carry(self, sent_sBKDW: Tensor) -> Callable[[], Tensor]:
        known = self.recompute_cache.load()
        if known is not None:
            return lambda: known[0]
        pending = self.exchange.carry(sent_sBKDW)

        def finish() -> Tensor:
            taken = pending()
            self.recompute_cache.save(taken)
            return taken

        return finish

    def carry_back(self, grad_received_sBKDW: Tensor) -> Callable[[], Tensor]:
        return self.exchange.carry_back(grad_received_sBKDW)
