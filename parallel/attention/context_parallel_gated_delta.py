"""Gated delta rule over a sharded sequence: ranks join document segments through their states; no row moves.

A rank computes its own segments; ``JoinSegments`` provides their initial states. A document's first segment needs no
remote state, and its last sends none: in a contiguous layout no rank computes a state twice.

With a cache, every rank has the state after all tokens before a chunk, and the last few of these tokens. Every rank
composes all segments in the chunk, in one order, so that states stay bitwise equal; single tokens send nothing.

Axes: B batch, t this rank's tokens, K key heads, D key head size, X channels of values, decay and β per key head, H
value heads, V value head size, R tokens that the convolution reads, C channels per key head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.kernels.devices import on_cpu
from longctx.kernels.gated_delta.front import GatedDeltaWeights, StateSpaceWeights, weights_of
from longctx.kernels.gated_delta.gated_delta_call import GatedDeltaOptions, InitialStates
from longctx.kernels.gated_delta.gated_delta_rule import gated_delta
from longctx.model.attention.core import check_no_gradient
from longctx.model.attention.kv_cache import LayerCache
from longctx.model.mixers.gated_delta_net import LocalDeltaPlan, LocalGatedDelta, as_tokens
from longctx.model.recompute import RecomputeCache
from parallel.attention.join_segments import JoinSegments
from parallel.attention.state_plans import CoreOfStates, StatesOfBatch, StatesOfChunk, no_backward


class ContextParallelGatedDelta(CoreOfStates):
    """Gated delta core over ranks."""

    layer_kind: ClassVar[str] = "gated delta rule"
    why_not_striped: ClassVar[str] = "gated delta layers (model.layers) pass a state from token to token"

    def __call__(
        self,
        q_BtKD: Tensor,
        k_BtKD: Tensor,
        v_BtKX: Tensor,
        *,
        plan: StatesOfBatch | StatesOfChunk,
        cache: LayerCache | None = None,
        scores: ScoreRules | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Return the output [B, t, K, G·V] for local tokens, equal to a single process up to rounding."""
        B, t, K = q_BtKD.shape[:3]
        batch, given = plan.shapes.batch, weights_of(weights)
        if isinstance(plan, StatesOfChunk):
            assert cache is not None, "a cached chunk's plan without the layer's cache"
            return _cached_forward(q_BtKD, k_BtKD, v_BtKX, given, plan, cache)
        q, k, v = (x.reshape(batch, -1, *x.shape[2:]) for x in (q_BtKD, k_BtKD, v_BtKX))
        plan.shapes.check_call(q, None)
        groups, exchange = 1, None
        if plan.mesh.context > 1 and plan.states.num_given:
            exchange = JoinSegments(plan.mesh, plan.states)
            # Before the heads are split: autograd then runs its backward last, after every group has used the exchange.
            q = _WaitAfterBackward.apply(q, exchange)
        # A rank waits for the previous rank's state. On a CPU, go head by head: then it waits only for the first head.
        # A GPU computes all heads at once in the time for one.
        if exchange is not None and on_cpu(q):
            groups = K
        kept = _ByGroup(recompute_cache, groups)
        parts = zip(*(x.chunk(groups, 2) for x in (q, k, v)), *(x.chunk(groups) for x in given), strict=True)
        outs = []
        for group, (q_h, k_h, v_h, *weights_h) in enumerate(parts):
            options = GatedDeltaOptions(
                segments=plan.segments,
                beta_scale=plan.shapes.beta_scale,
                exchange=exchange,
                saved=kept.of_group(group),
            )
            of_group = weights_of(weights_h)
            outs.append(gated_delta(as_tokens(q_h, k_h, v_h, of_group), of_group, options)[0])
        kept.finish()
        # Forward, too: a rank without remote states would otherwise run ahead with pending collectives.
        if exchange is not None:
            exchange.wait_for_gathers()
        out = outs[0]
        if groups > 1:
            out = torch.cat(outs, 2)
        return out.view(B, t, K, -1)


class _WaitAfterBackward(torch.autograd.Function):
    """Identity that, in backward, waits for an exchange's unread gathers, after all readers of the values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: JoinSegments) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor):  # type: ignore[override]
        ctx.exchange.wait_for_gathers()
        return dx, None


def _cached_forward(
    q_BtKD: Tensor,
    k_BtKD: Tensor,
    v_BtKX: Tensor,
    weights: GatedDeltaWeights | StateSpaceWeights,
    plan: StatesOfChunk,
    cache: LayerCache,
) -> Tensor:
    """Return the output [B, t, K, G·V] for new tokens, and update the cached state. Collective."""
    plan.shapes.check_call(q_BtKD, None)
    check_no_gradient(q_BtKD)
    # Every rank has all tokens and the state before them, so each computes the same new state locally.
    if plan.states is None:
        local = LocalDeltaPlan(plan.segments, plan.shapes.beta_scale)
        return LocalGatedDelta()(q_BtKD, k_BtKD, v_BtKX, plan=local, cache=cache, weights=weights)
    exchange = _AfterState(JoinSegments(plan.mesh, plan.states, cache.state))
    options = GatedDeltaOptions(segments=plan.segments, beta_scale=plan.shapes.beta_scale, exchange=exchange)
    out, _ = gated_delta(as_tokens(q_BtKD, k_BtKD, v_BtKX, weights), weights, options)
    cache.set_state(InitialStates(exchange.state, exchange.newest), plan.num_tokens)
    return out.unflatten(2, (q_BtKD.shape[2], -1)).flatten(3)


class _AfterState:
    """Exchange with one result more than there are segments: the state after the chunk's last token."""

    state: Tensor
    """State after the chunk, [1, B, H, D, V]."""
    newest: Tensor
    """Channels for the chunk's last tokens, [1, B, R, K, C]."""

    def __init__(self, join: JoinSegments) -> None:
        self.join = join

    def rows(self, tail_sBRKC: Tensor) -> Callable[[], Tensor]:
        pending = self.join.rows(tail_sBRKC)

        def finish() -> Tensor:
            before = pending()
            self.newest = before[-1:]
            return before[:-1]

        return finish

    def states(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        pending = self.join.states(pairs_sBHDW)

        def finish() -> Tensor:
            initial_states = pending()
            self.state = initial_states[-1:]
            return initial_states[:-1]

        return finish

    def rows_back(self, grad_conv_state_sBRKC: Tensor) -> Callable[[], Tensor]:
        return no_backward(grad_conv_state_sBRKC)

    def states_back(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        return no_backward(pairs_sBHDW)


class _ByGroup:
    """Results per head group, which a recompute cache stores as one layer's."""

    def __init__(self, cache: RecomputeCache | None, groups: int) -> None:
        self._cache, self._results = cache, [()] * groups
        self._known: tuple[Tensor, ...] | None = None
        if cache is not None:
            self._known = cache.load()

    def of_group(self, group: int) -> _OneGroup | None:
        """Return the store for one group's results; None without a cache."""
        if self._cache is None:
            return None
        known = None
        if self._known is not None:
            count = len(self._known) // len(self._results)
            known = self._known[group * count : (group + 1) * count]
        return _OneGroup(self._results, group, known)

    def finish(self) -> None:
        """Pass all groups' results to the cache."""
        if self._cache is not None and self._known is None:
            self._cache.save(*chain.from_iterable(self._results))
        # Break the reference cycle: a graph that holds its own results is freed only by the garbage collector.
        self._results.clear()


@dataclass
class _OneGroup:
    """One group's results (``longctx.kernels.gated_delta.gated_delta_call.Saved``)."""

    results: list[tuple[Tensor, ...]]
    group: int
    known: tuple[Tensor, ...] | None

    def load(self) -> tuple[Tensor, ...] | None:
        # Release the reference on load, as the cache does.
        known, self.known = self.known, None
        return known

    def save(self, *tensors: Tensor) -> None:
        self.results[self.group] = tensors
