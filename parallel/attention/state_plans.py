"""Plans of layers that pass states on, of a batch and of a cache's chunk: the segments that give or take a state.

The kind of layer (``linear``, ``gated_delta``) defines the states and how they are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.linear_attention import Segments
from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.mask import AttentionMask
from parallel.attention.agreement import agree, degree_problem
from parallel.attention.cached import agree_on_chunk, chunk_problem
from parallel.attention.plan import CoreOverRanks, build_layout, flattened, tokens_problem
from parallel.layout.cached import ChunkPlacement
from parallel.mesh import Mesh
from parallel.schedule.states import Open, StatePlan


@dataclass(frozen=True, eq=False)
class StatesOfBatch:
    """States of a batch that are sent, and this rank's segments, for all layers of one kind in one forward pass."""

    mesh: Mesh
    """The ranks that share this batch's sequence."""
    states: StatePlan
    """Its layout is where the batch's tokens are: no row leaves its rank."""
    shapes: AttentionShapes
    """Of this rank's shard: rows of a flattened micro-batch count as the one sequence that the layout is over."""
    segments: Segments

    @classmethod
    def build(cls, states: StatePlan, mesh: Mesh, shapes: AttentionShapes, *, what: str) -> Self:
        """Build the plan for these shapes, for the kind of layer called ``what``. Collective.

        Raise ConfigError on every rank if one has a problem, ClusterError if ranks differ or one is too late.
        """
        problem = degree_problem(states.layout, mesh)
        if problem is None:
            num_local = states.layout.num_local(mesh.context_rank)
            shapes = flattened(shapes, num_local)
            problem = tokens_problem(shapes, num_local, mesh)
        agree(states, mesh, _told(what, shapes), problem)
        return cls(mesh, states, shapes, states.segments(mesh.context_rank))


@dataclass(frozen=True, eq=False)
class StatesOfChunk:
    """Segments of a cache's chunk on this rank, and the states of it that are sent."""

    mesh: Mesh
    states: StatePlan | None
    """None if every rank has all tokens of the chunk, of which nothing travels."""
    shapes: AttentionShapes
    segments: Segments
    num_tokens: int
    """Tokens of the chunk, on all ranks."""

    @classmethod
    def build(cls, mask: AttentionMask, shapes: AttentionShapes, placement: object, mesh: Mesh, *, what: str) -> Self:
        """Build the plan of a chunk. Collective, except for single tokens.

        Raise ConfigError on every rank if one has a problem, ClusterError if ranks differ or one is too late.
        """
        problem = chunk_problem(mask, shapes, placement, mesh)
        plan = None
        if problem is None:
            assert isinstance(placement, ChunkPlacement)
            try:
                states, segments = _of_chunk(placement, mesh)
                plan = cls(mesh, states, shapes, segments, placement.num_tokens)
            except ConfigError as error:
                problem = str(error)
        agree_on_chunk(placement, mesh, _told(what, shapes), problem)
        assert plan is not None, "a problem that the ranks did not tell each other"
        return plan


@dataclass(frozen=True)
class CoreOfStates(CoreOverRanks):
    """Core of layers that pass states on; none of the options changes it.

    Ranks that split heads in other layers (``parallel.ulysses``) hold their own rows here, as all others do: states are
    so small that trading rows for heads would only add communication.
    """

    what: ClassVar[str]
    """What ranks call it when they agree."""
    why_not_striped: ClassVar[str]
    """What such layers do, in which every token of a striped layout would be a segment of its own."""

    @classmethod
    def check_layout(cls, layout: str, ring_degree: int) -> None:
        """Raise ConfigError if single tokens are dealt to several ranks."""
        if layout == "striped" and ring_degree > 1:
            raise ConfigError(
                f"parallel.layout='striped' deals single tokens to ranks, and {cls.why_not_striped}.\n"
                "Try parallel.layout='zigzag' (or contiguous or balanced)."
            )

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> StatesOfBatch | StatesOfChunk:
        """Build the states of the mask's documents or of a cache's chunk, on which the ranks agree. Collective."""
        if shapes.cached_tokens is not None:
            return StatesOfChunk.build(mask, shapes, placement, self.mesh, what=self.what)
        layout = placement or build_layout(self.layout, self.mesh, mask)
        states = StatePlan.build(layout, mask.documents, causal=mask.causal)
        return StatesOfBatch.build(states, self.mesh, shapes, what=self.what)


def no_backward(_: Tensor) -> Callable[[], Tensor]:
    """Raise NotImplementedError: an exchange over a cache has no backward half."""
    raise NotImplementedError("attention over a cache has no backward pass")


def _told(what: str, shapes: AttentionShapes) -> str:
    """Return the text that ranks compare, and show if it differs."""
    heads = f"{shapes.num_heads}/{shapes.num_kv_heads} heads of {shapes.head_dim} (values {shapes.value_dim})"
    return f"{what}, {shapes.batch} × {heads}, {shapes.dtype}"


def _of_chunk(placement: ChunkPlacement, mesh: Mesh) -> tuple[StatePlan | None, Segments]:
    """Return the states of a chunk, and this rank's segments. Raise ConfigError if the layout deals single tokens.

    Every segment gives and takes: the cached state enters the first one, too, and the last one's leaves.
    """
    if placement.layout is None:
        takes: tuple[int, ...] = ()
        # Before the first token there is no state.
        if placement.earlier.num_tokens:
            takes = (0,)
        return None, Segments(PackedDocuments.of([0, placement.num_tokens]), takes=takes, gives=(0,))
    states = StatePlan.build(placement.layout)
    every = tuple(tuple(_every_segment(states, rank)) for rank in range(mesh.context))
    # One more state is wanted, over all segments: the one after the chunk.
    end = Open(document=0, start=placement.num_tokens, segment=-1)
    wanted = tuple((*of_rank, end) for of_rank in every)
    own = tuple(x.segment for x in every[mesh.context_rank])
    segments = Segments(PackedDocuments.of(states.ends[mesh.context_rank]), takes=own, gives=own)
    return replace(states, given=every, taken=wanted), segments


def _every_segment(states: StatePlan, rank: int) -> list[Open]:
    """Return all segments of a rank, by their first token."""
    found: list[Open] = []
    row, ends = 0, states.ends[rank]
    for run in states.layout.rank_runs(rank):
        # Adjacent runs are one segment: then no segment begins at this row.
        if row in ends[:-1]:
            found.append(Open(document=0, start=run.start, segment=ends.index(row)))
        row += run.count
    return found
