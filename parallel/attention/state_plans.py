"""Plans for layers that pass states between ranks, for a batch or a cached chunk: segments that send or receive a
state.

The layer kind (``linear``, ``gated_delta``) defines the states and how they are sent.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.linear_attention import StateSegments
from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.mask import AttentionMask
from parallel.attention.agreement import degree_problem, verify_across_ranks
from parallel.attention.cached_attention import chunk_problem, verify_chunk
from parallel.attention.context_parallel_plan import CoreOverRanks, build_sequence_layout, flattened, tokens_problem
from parallel.layout.cached_layout import ChunkPlacement
from parallel.mesh import Mesh
from parallel.schedule.states import SplitSegment, StatePlan


@dataclass(frozen=True, eq=False)
class StatesOfBatch:
    """States that ranks send for a batch, and this rank's segments: shared by all layers of one kind in one forward
    pass.
    """

    mesh: Mesh
    """Ranks that share this batch's sequence."""
    states: StatePlan
    """Its layout places the batch's tokens; no row leaves its rank."""
    shapes: AttentionShapes
    """Shapes of this rank's shard; a flattened micro-batch counts as the one sequence that the layout covers."""
    segments: StateSegments

    @classmethod
    def build(cls, states: StatePlan, mesh: Mesh, shapes: AttentionShapes, *, layer_kind: str) -> Self:
        """Build the plan for these shapes and the layer kind ``layer_kind``. Collective.

        Raise ConfigError on every rank if one has a problem, ClusterError if ranks mismatch or one times out.
        """
        problem = degree_problem(states.layout, mesh)
        if problem is None:
            num_local = states.layout.num_local(mesh.context_rank)
            shapes = flattened(shapes, num_local)
            problem = tokens_problem(shapes, num_local, mesh)
        verify_across_ranks(states, mesh, _signature(layer_kind, shapes), problem)
        return cls(mesh, states, shapes, states.segments(mesh.context_rank))


@dataclass(frozen=True, eq=False)
class StatesOfChunk:
    """A cached chunk's segments on this rank, and its states to send."""

    mesh: Mesh
    states: StatePlan | None
    """None if every rank has all chunk tokens, so that no state is sent."""
    shapes: AttentionShapes
    segments: StateSegments
    num_tokens: int
    """Tokens in the chunk, on all ranks."""

    @classmethod
    def build(
        cls, mask: AttentionMask, shapes: AttentionShapes, placement: object, mesh: Mesh, *, layer_kind: str
    ) -> Self:
        """Build a chunk's plan. Collective, except for single tokens.

        Raise ConfigError on every rank if one has a problem, ClusterError if ranks mismatch or one times out.
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
        # Collective even after an error, so that all ranks raise it instead of waiting.
        verify_chunk(placement, mesh, _signature(layer_kind, shapes), problem)
        assert plan is not None, "a problem that the ranks did not exchange"
        return plan


@dataclass(frozen=True)
class CoreOfStates(CoreOverRanks):
    """Core for layers that pass states between ranks; it ignores all options.

    Ranks that split heads in other layers (``parallel.ulysses``) keep their own rows here: states are so small that
    exchanging rows for heads would only add communication.
    """

    layer_kind: ClassVar[str]
    """Layer kind, for comparison and error messages."""
    why_not_striped: ClassVar[str]
    """Reason in an error message: in a striped layout every token would be its own segment."""

    @classmethod
    def check_layout(cls, layout: str, ring_degree: int) -> None:
        """Raise ConfigError if the layout assigns single tokens to several ranks."""
        if layout == "striped" and ring_degree > 1:
            raise ConfigError(
                f"parallel.layout='striped' assigns single tokens to ranks, but {cls.why_not_striped}.\n"
                "Try parallel.layout='zigzag' (or contiguous or balanced)."
            )

    def plan(
        self, mask: AttentionMask, shapes: AttentionShapes, placement: Any = None, key_placement: Any = None
    ) -> StatesOfBatch | StatesOfChunk:
        """Build the states plan for the mask's documents or a cached chunk, and compare it over ranks. Collective."""
        if shapes.cached_tokens is not None:
            return StatesOfChunk.build(mask, shapes, placement, self.mesh, layer_kind=self.layer_kind)
        layout = placement or build_sequence_layout(self.layout, self.mesh, mask)
        states = StatePlan.build(layout, mask.documents, causal=mask.causal)
        return StatesOfBatch.build(states, self.mesh, shapes, layer_kind=self.layer_kind)


def no_backward(_: Tensor) -> Callable[[], Tensor]:
    """Raise NotImplementedError: an exchange over a cache has no backward."""
    raise NotImplementedError("attention over a cache has no backward pass")


def _signature(layer_kind: str, shapes: AttentionShapes) -> str:
    """Return the text that ranks compare, and show on a mismatch."""
    heads = f"{shapes.num_heads}/{shapes.num_kv_heads} heads of {shapes.head_dim} (values {shapes.value_dim})"
    return f"{layer_kind}, {shapes.batch} × {heads}, {shapes.dtype}"


def _of_chunk(placement: ChunkPlacement, mesh: Mesh) -> tuple[StatePlan | None, StateSegments]:
    """Return a chunk's states and this rank's segments. Raise ConfigError if the layout assigns single tokens.

    Every segment sends and receives: the first receives the cached state, and the last one's result becomes the new
    cached state.
    """
    if placement.layout is None:
        received_segments: tuple[int, ...] = ()
        # Before the first token there is no state.
        if placement.prefix.num_tokens:
            received_segments = (0,)
        return None, StateSegments(PackedDocuments.of([0, placement.num_tokens]), received=received_segments, sent=(0,))
    # A chunk is one document, so every segment contributes to the state after it.
    states = StatePlan.build(placement.layout)
    every = tuple(tuple(_every_segment(states, rank)) for rank in range(mesh.context))
    # Request one extra state, over all segments: the one after the chunk.
    end = SplitSegment(document=0, start=placement.num_tokens, segment=-1)
    wanted = tuple((*of_rank, end) for of_rank in every)
    own = tuple(x.segment for x in every[mesh.context_rank])
    segments = StateSegments(PackedDocuments.of(states.ends[mesh.context_rank]), received=own, sent=own)
    return replace(states, given=every, taken=wanted), segments


def _every_segment(states: StatePlan, rank: int) -> list[SplitSegment]:
    """Return all the rank's segments, with their first tokens."""
    found: list[SplitSegment] = []
    row, ends = 0, states.ends[rank]
    for run in states.layout.rank_runs(rank):
        # Adjacent token spans merge into one segment: then no segment starts at this row.
        if row in ends[:-1]:
            found.append(SplitSegment(document=0, start=run.start, segment=ends.index(row)))
        row += run.count
    return found
