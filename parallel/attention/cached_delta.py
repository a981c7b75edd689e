"""The gated delta rule of new tokens after a cached state: a chunk's segments are joined, single tokens send nothing.

The state of all tokens before a chunk, and the last of them, are on every rank. Of a chunk that is split over ranks
every rank composes all segments, in one order, so that states stay the same to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.gated_delta.front import Weights
from longctx.kernels.gated_delta.rule import Carried, Options, gated_delta
from longctx.kernels.linear_attention import Segments
from longctx.model.attention.cache import LayerCache
from longctx.model.attention.core import AttentionShapes, check_no_gradient
from longctx.model.attention.mask import AttentionMask
from longctx.model.mixers.gated_delta import LocalDeltaPlan, LocalGatedDelta, as_tokens
from parallel.attention.cached import agree_on_chunk, chunk_problem
from parallel.attention.cached_linear import chunk_states
from parallel.attention.join_segments import JoinSegments
from parallel.layout.cached import ChunkPlacement
from parallel.mesh import Mesh


@dataclass(frozen=True, eq=False)
class CachedDeltaPlan:
    """This rank's segments of a chunk, and how they meet those of others."""

    shapes: AttentionShapes
    num_tokens: int
    """Tokens of the chunk, on all ranks."""
    segments: Segments
    join: JoinSegments | None
    """None if every rank has all tokens of the chunk."""

    @classmethod
    def build(cls, mask: AttentionMask, shapes: AttentionShapes, placement: object, mesh: Mesh) -> CachedDeltaPlan:
        """Return the plan of a chunk. Collective, but for single tokens.

        ConfigError on every rank if one has a problem, ClusterError if ranks differ or one is too late.
        """
        problem = chunk_problem(mask, shapes, placement, mesh)
        plan = None
        if problem is None:
            assert isinstance(placement, ChunkPlacement)
            try:
                plan = _assemble(mask, shapes, placement, mesh)
            except ConfigError as error:
                problem = str(error)
        heads = f"{shapes.num_kv_heads} key heads of {shapes.head_dim} (values {shapes.value_dim})"
        agree_on_chunk(placement, mesh, f"gated delta rule, {shapes.batch} × {heads}, {shapes.dtype}", problem)
        assert plan is not None, "a problem that the ranks did not tell each other"
        return plan

    def attend(self, q: Tensor, k: Tensor, v: Tensor, weights: Weights, cache: LayerCache) -> Tensor:
        """Return the output [B, t, K, G·V] of new tokens, which the cached state then covers. Collective."""
        self.shapes.check_call(q, None)
        check_no_gradient(q)
        if self.join is None:
            plan = LocalDeltaPlan(self.segments, self.shapes.beta_scale)
            return LocalGatedDelta()(q, k, v, plan=plan, cache=cache, weights=weights)
        exchange = _AfterState(replace(self.join, carried=cache.state))
        options = Options(segments=self.segments, beta_scale=self.shapes.beta_scale, exchange=exchange)
        out, _ = gated_delta(as_tokens(q, k, v, weights), weights, options)
        cache.set_state(Carried(exchange.state, exchange.newest), self.num_tokens)
        return out.unflatten(2, (q.shape[2], -1)).flatten(3)


class _AfterState:
    """An exchange of which one result more is asked for: what follows the chunk's last token."""

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
        raise NotImplementedError("attention over a cache has no backward pass")

    def states_back(self, pairs_sBHDW: Tensor) -> Callable[[], Tensor]:
        raise NotImplementedError("attention over a cache has no backward pass")


def _assemble(mask: AttentionMask, shapes: AttentionShapes, placement: ChunkPlacement, mesh: Mesh) -> CachedDeltaPlan:
    """Return this rank's segments. ConfigError if the layout deals single tokens."""
    if placement.layout is None:
        segments = LocalGatedDelta().plan(mask, shapes).segments
        return CachedDeltaPlan(shapes, placement.num_tokens, segments, None)
    states, segments = chunk_states(placement, mesh)
    return CachedDeltaPlan(shapes, placement.num_tokens, segments, JoinSegments(mesh, states))
