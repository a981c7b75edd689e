"""The gated delta rule over a sequence that is spread over ranks: segments of documents are joined, no row moves.

A rank computes its own segments; ``JoinSegments`` provides the states that enter them. A document's first segment needs
no state of others, and its last gives none: with a contiguous layout no rank computes a state twice.

With a cache, every rank has the state of all tokens before a chunk, and the last of those tokens. Every rank composes
all segments of the chunk, in one order, so that states stay the same to the bit; single tokens send nothing.

Axes: B batch, t this rank's tokens, K key heads, D key head size, X channels of values, decay and β of a key head,
H value heads, V value head size, R tokens that the convolution reads, C channels of a key head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

import torch
from torch import Tensor

from longctx.kernels.attention.contract import Scores
from longctx.kernels.devices import on_cpu
from longctx.kernels.gated_delta.call import Carried, Options
from longctx.kernels.gated_delta.front import StateSpaceWeights, Weights, weights_of
from longctx.kernels.gated_delta.rule import gated_delta
from longctx.model.attention.cache import LayerCache
from longctx.model.attention.core import check_no_gradient
from longctx.model.mixers.gated_delta import LocalDeltaPlan, LocalGatedDelta, as_tokens
from longctx.model.recompute import RecomputeCache
from parallel.attention.join_segments import JoinSegments
from parallel.attention.state_plans import CoreOfStates, StatesOfBatch, StatesOfChunk, no_backward


class ContextParallelGatedDelta(CoreOfStates):
    """Core of gated delta layers over ranks."""

    what: ClassVar[str] = "gated delta rule"
    why_not_striped: ClassVar[str] = "gated delta layers (model.layers) pass a state from token to token"

    def __call__(
        self,
        q_BtKD: Tensor,
        k_BtKD: Tensor,
        v_BtKX: Tensor,
        *,
        plan: StatesOfBatch | StatesOfChunk,
        cache: LayerCache | None = None,
        scores: Scores | None = None,
        weights: Sequence[Tensor] = (),
        recompute_cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Return the output [B, t, K, G·V] of this rank's tokens, equal to one process's but for rounding."""
        B, t, K = q_BtKD.shape[:3]
        batch, given = plan.shapes.batch, weights_of(weights)
        if isinstance(plan, StatesOfChunk):
            assert cache is not None, "the plan of a cached chunk came without the layer's cache"
            return _attend_cached(q_BtKD, k_BtKD, v_BtKX, given, plan, cache)
        q, k, v = (x.reshape(batch, -1, *x.shape[2:]) for x in (q_BtKD, k_BtKD, v_BtKX))
        plan.shapes.check_call(q, None)
        groups, exchange = 1, None
        if plan.mesh.context > 1 and plan.states.num_given:
            exchange = JoinSegments(plan.mesh, plan.states)
            q = _SettleBehind.apply(q, exchange)
        # A rank waits for the state of the one before it: head by head, it waits only for the first head. A GPU
        # computes all heads at once in the time of one.
        if exchange is not None and on_cpu(q):
            groups = K
        kept = _ByGroup(recompute_cache, groups)
        parts = zip(*(x.chunk(groups, 2) for x in (q, k, v)), *(x.chunk(groups) for x in given), strict=True)
        outs = []
        for group, (q_h, k_h, v_h, *weights_h) in enumerate(parts):
            options = Options(
                segments=plan.segments,
                beta_scale=plan.shapes.beta_scale,
                exchange=exchange,
                saved=kept.of_group(group),
            )
            of_group = weights_of(weights_h)
            outs.append(gated_delta(as_tokens(q_h, k_h, v_h, of_group), of_group, options)[0])
        kept.finish()
        if exchange is not None:
            exchange.settle()
        out = outs[0]
        if groups > 1:
            out = torch.cat(outs, 2)
        return out.view(B, t, K, -1)


class _SettleBehind(torch.autograd.Function):
    """Identity that settles an exchange after the backward passes of all readers of the values."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: JoinSegments) -> Tensor:
        ctx.exchange = exchange
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor):  # type: ignore[override]
        ctx.exchange.settle()
        return dx, None


def _attend_cached(
    q_BtKD: Tensor,
    k_BtKD: Tensor,
    v_BtKX: Tensor,
    weights: Weights | StateSpaceWeights,
    plan: StatesOfChunk,
    cache: LayerCache,
) -> Tensor:
    """Return the output [B, t, K, G·V] of new tokens, and add them to the cached state. Collective."""
    plan.shapes.check_call(q_BtKD, None)
    check_no_gradient(q_BtKD)
    if plan.states is None:
        local = LocalDeltaPlan(plan.segments, plan.shapes.beta_scale)
        return LocalGatedDelta()(q_BtKD, k_BtKD, v_BtKX, plan=local, cache=cache, weights=weights)
    exchange = _AfterState(JoinSegments(plan.mesh, plan.states, cache.state))
    options = Options(segments=plan.segments, beta_scale=plan.shapes.beta_scale, exchange=exchange)
    out, _ = gated_delta(as_tokens(q_BtKD, k_BtKD, v_BtKX, weights), weights, options)
    cache.set_state(Carried(exchange.state, exchange.newest), plan.num_tokens)
    return out.unflatten(2, (q_BtKD.shape[2], -1)).flatten(3)


class _AfterState:
    """Exchange with one more result than segments: the state after the chunk's last token."""

    state: Tensor
    """After the chunk, [1, B, H, D, V]."""
    newest: Tensor
    """Channels of the chunk's last tokens, [1, B, R, K, C]."""

    def __init__(self, join: JoinSegments) -> None:
        self.join = join

    def rows(self, tails_sBRKC: Tensor) -> Callable[[], Tensor]:
        arriving = self.join.rows(tails_sBRKC)

        def finish() -> Tensor:
            before = arriving()
            self.newest = before[-1:]
            return before[:-1]

        return finish

    def states(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        arriving = self.join.states(pairs_sBHDW)

        def finish() -> Tensor:
            entering = arriving()
            self.state = entering[-1:]
            return entering[:-1]

        return finish

    def rows_back(self, dbefore_sBRKC: Tensor) -> Callable[[], Tensor]:
        return no_backward(dbefore_sBRKC)

    def states_back(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        return no_backward(pairs_sBHDW)


class _ByGroup:
    """Results of groups of heads, which a recompute cache stores as one layer's."""

    def __init__(self, cache: RecomputeCache | None, groups: int) -> None:
        self._cache, self._results = cache, [()] * groups
        self._known: tuple[Tensor, ...] | None = None
        if cache is not None:
            self._known = cache.load()

    def of_group(self, group: int) -> _OneGroup | None:
        """Return the store of one group's results; None if nothing is kept."""
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
        # A graph that holds its own results is freed only by the garbage collector.
        self._results.clear()


@dataclass
class _OneGroup:
    """Results of one group (``longctx.kernels.gated_delta.call.Saved``)."""

    results: list[tuple[Tensor, ...]]
    group: int
    known: tuple[Tensor, ...] | None

    def load(self) -> tuple[Tensor, ...] | None:
        # Handed over and not kept, as in the cache.
        known, self.known = self.known, None
        return known

    def save(self, *tensors: Tensor) -> None:
        self.results[self.group] = tensors
