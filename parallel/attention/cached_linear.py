"""Linear attention of new tokens after a cached state: a chunk's states are gathered, single tokens send nothing.

The state of all tokens before a chunk is on every rank. Of a chunk that is split over ranks, each rank sends the sums
over its own keys; every rank adds all of them to the state, in one order, so that states stay the same to the bit.

Axes: B batch, t this rank's new tokens, H query heads, K key/value heads, D query/key head size, V value head size,
W = V + 1, s states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.linear_attention import Segments, linear_attention
from longctx.model.attention.cache import LayerCache
from longctx.model.attention.core import AttentionShapes, check_no_gradient
from longctx.model.attention.mask import AttentionMask
from parallel.attention.cached import agree_on_chunk, chunk_problem
from parallel.attention.gather_states import GatherStates
from parallel.layout.cached import ChunkPlacement
from parallel.mesh import Mesh
from parallel.schedule.states import Open, StatePlan


@dataclass(frozen=True, eq=False)
class CachedLinearPlan:
    """This rank's segments of a chunk, and which states of it travel."""

    shapes: AttentionShapes
    segments: Segments
    num_tokens: int
    """Tokens of the chunk, on all ranks."""
    exchange: GatherStates | None
    """None where every rank has all tokens of the chunk."""

    @classmethod
    def build(cls, mask: AttentionMask, shapes: AttentionShapes, placement: object, mesh: Mesh) -> CachedLinearPlan:
        """The plan of a chunk. Collective, but for single tokens.

        ConfigError on every rank where one has a problem, ClusterError where ranks differ or one is too late.
        """
        problem = chunk_problem(mask, shapes, placement, mesh)
        plan = None
        if problem is None:
            assert isinstance(placement, ChunkPlacement)
            try:
                plan = _assemble(shapes, placement, mesh)
            except ConfigError as error:
                problem = str(error)
        heads = f"{shapes.num_heads}/{shapes.num_kv_heads} heads of {shapes.head_dim} (values {shapes.value_dim})"
        agree_on_chunk(placement, mesh, f"linear attention, {shapes.batch} × {heads}, {shapes.dtype}", problem)
        assert plan is not None, "a problem that the ranks did not tell each other"
        return plan


def linear_attend_cached(
    q_BtHD: Tensor, k_BtKD: Tensor, v_BtKV: Tensor, plan: CachedLinearPlan, cache: LayerCache
) -> Tensor:
    """Output [B, t, H, V] of new tokens; their sums join the cached state. Collective; there is no backward."""
    plan.shapes.check_call(q_BtHD, None)
    check_no_gradient(q_BtHD)
    segments = plan.segments
    if plan.exchange is None:
        out, state = linear_attention(q_BtHD, k_BtKD, v_BtKV, segments=segments, carried_sBKDW=cache.state)
        cache.add_state(state, plan.num_tokens)
        return out
    exchange = _AfterState(plan.exchange, cache)
    out, _ = linear_attention(q_BtHD, k_BtKD, v_BtKV, segments=segments, exchange=exchange)
    cache.add_state(exchange.of_chunk, plan.num_tokens)
    return out


class _AfterState:
    """An exchange in which the state of the tokens before the chunk enters every segment, too."""

    def __init__(self, exchange: GatherStates, cache: LayerCache) -> None:
        self.exchange, self.cache = exchange, cache
        self.of_chunk: Tensor
        """The sum over the chunk's keys on all ranks, [1, B, K, D, W]; set when the states have arrived."""

    def carry(self, given_sBKDW: Tensor) -> Callable[[], Tensor]:
        arriving, before = self.exchange.carry(given_sBKDW), self.cache.state

        def finish() -> Tensor:
            sums = arriving()
            taken, self.of_chunk = sums[:-1], sums[-1:]
            if before is not None:
                taken = taken + before
            return taken

        return finish

    def carry_back(self, dtaken_sBKDW: Tensor) -> Callable[[], Tensor]:
        raise NotImplementedError("attention over a cache has no backward pass")


def _assemble(shapes: AttentionShapes, placement: ChunkPlacement, mesh: Mesh) -> CachedLinearPlan:
    """This rank's segments. ConfigError when the layout deals single tokens."""
    num_tokens = placement.num_tokens
    if placement.layout is None:
        takes: tuple[int, ...] = ()
        if placement.earlier.num_tokens:
            takes = (0,)
        return CachedLinearPlan(
            shapes, Segments(PackedDocuments.of([0, num_tokens]), takes=takes, gives=(0,)), num_tokens, None
        )
    states, segments = chunk_states(placement, mesh)
    return CachedLinearPlan(shapes, segments, num_tokens, GatherStates(mesh, states))


def chunk_states(placement: ChunkPlacement, mesh: Mesh) -> tuple[StatePlan, Segments]:
    """The states of a chunk that is split over ranks, and this rank's segments. ConfigError for single tokens.

    Every segment gives and takes: the cached state enters the first one, too, and the last one's leaves.
    """
    assert placement.layout is not None
    states = StatePlan.build(placement.layout)
    every = tuple(tuple(_every_segment(states, rank)) for rank in range(mesh.context))
    # One more is wanted, of all that there is: the state after the chunk.
    end = Open(document=0, start=placement.num_tokens, segment=-1)
    wanted = tuple((*of_rank, end) for of_rank in every)
    own = tuple(x.segment for x in every[mesh.context_rank])
    segments = Segments(PackedDocuments.of(states.ends[mesh.context_rank]), takes=own, gives=own)
    return replace(states, given=every, taken=wanted), segments


def _every_segment(states: StatePlan, rank: int) -> list[Open]:
    """All segments of a rank, by their first token."""
    found: list[Open] = []
    row, ends = 0, states.ends[rank]
    for run in states.layout.rank_runs(rank):
        # Runs that adjoin are one segment: then no segment begins at this row.
        if row in ends[:-1]:
            found.append(Open(document=0, start=run.start, segment=ends.index(row)))
        row += run.count
    return found
