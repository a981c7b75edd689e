"""Linear attention over a sequence that is spread over ranks: one all-gather of states, whatever the length (LASP-2).

A rank sends, for each document that goes on elsewhere, the sum over its own keys (arXiv 2502.07563): a matrix a key
head, not rows. They travel while the rank works on its own rows. Backward is the mirror image: gradients of the states
that were taken are gathered, and each segment adds those of its document's later segments.

Axes: B batch, t this rank's tokens, H query heads, K key/value heads, D query/key head size, V value head size,
W = V + 1, s states.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.contract import Scores
from longctx.kernels.linear import CHUNK, Segments, StateExchange, check_tensors, linear_attention
from longctx.model.cores import AttentionMask, KVCache
from longctx.model.stash import Stash
from parallel.agreement import agree
from parallel.attention import outside_graphs
from parallel.layout import SequenceLayout, check_documents
from parallel.mesh import Mesh
from parallel.schedule import cached_layout
from parallel.transport import guarded

T = TypeVar("T")


@outside_graphs
def linear_attend(
    q_BtHD: Tensor,
    k_BtKD: Tensor,
    v_BtKV: Tensor,
    *,
    layout: SequenceLayout,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    mesh: Mesh,
    causal: bool = True,
    chunk: int = CHUNK,
    stash: Stash | None = None,
    agree_again: bool = False,
) -> Tensor:
    """Linear attention (feature map elu + 1) of this rank's queries over the keys of their documents on all ranks.

    Inputs are this rank's share under ``layout``: [1, t, …] of it, the same tokens in B rows when the layout is over
    flattened rows, or B stacked sequences of the same documents. ``cu_seqlens`` are global (default: one document).
    Returns [B, t, H, V] in q's dtype, equal to one process's result but for rounding, the same bits every time. Every
    rank of the context group must call it alike; with the first use of a layout and documents (or ``agree_again``) they
    compare what they were given. A ``stash`` keeps the states that entered this rank's segments: recomputing the layer
    sends nothing. ConfigError when the layout deals single tokens (striped) or shapes do not fit it; ClusterError when
    a rank differs, dies or is too late.
    """
    B, t = q_BtHD.shape[:2]
    share = layout.num_local(mesh.context_rank)
    plan = StatePlan.build(layout, cu_seqlens, causal=causal)
    if t != share and B * t == share:  # rows of a flattened micro-batch
        q_BtHD, k_BtKD, v_BtKV = (x.reshape(1, share, *x.shape[2:]) for x in (q_BtHD, k_BtKD, v_BtKV))
    if stash is None or not stash.replaying:  # a layer that is computed again has agreed already
        words = (
            f"linear attention, {q_BtHD.shape[0]} × {tuple(k_BtKD.shape[2:])} and {v_BtKV.shape[-1]}, {q_BtHD.dtype}"
        )
        agree(plan, mesh, words, _problem(q_BtHD, k_BtKD, v_BtKV, share, mesh), again=agree_again)
    exchange: StateExchange | None = _AllGather(mesh, plan) if plan.num_given else None
    if exchange is not None and stash is not None:
        exchange = _Stashed(exchange, stash)
    segments = plan.segments(mesh.context_rank)
    out, _ = linear_attention(q_BtHD, k_BtKD, v_BtKV, segments=segments, causal=causal, exchange=exchange, chunk=chunk)
    return out.view(B, t, *out.shape[2:])


@dataclass(frozen=True)
class ContextParallelLinearAttention:
    """The core of a linear layer whose sequence is shared by the mesh's context ranks.

    Ranks that split heads in other layers (``parallel.ulysses``) hold rows of their own here as any others do: states
    are so small that trading rows for heads would only add to what travels.
    """

    mesh: Mesh
    layout: str

    @outside_graphs
    def __call__(
        self,
        q_BtHD: Tensor,
        k_BtKD: Tensor,
        v_BtKV: Tensor,
        *,
        mask: AttentionMask,
        layer: int,
        cache: KVCache | None = None,
        scores: Scores | None = None,
        sinks_H: Tensor | None = None,
        stash: Stash | None = None,
    ) -> Tensor:
        """Output [B, t, H, V]; ``scores`` and ``sinks_H`` belong to softmax."""
        if cache is not None:
            raise ConfigError("decoding with a sequence spread over ranks is not built yet; generate in one process.")
        return linear_attend(
            q_BtHD,
            k_BtKD,
            v_BtKV,
            layout=cached_layout(self.layout, self.mesh.context, self.mesh.ulysses, mask.cu_seqlens),
            cu_seqlens=mask.cu_seqlens,
            mesh=self.mesh,
            causal=mask.causal,
            stash=stash,
            agree_again=layer == 0,  # once a micro-batch, whatever a rank has met before
        )


def check_linear_layout(layout: str, ring_degree: int) -> None:
    """ConfigError when linear layers cannot sum over what a rank holds of the sequence."""
    if layout == "striped" and ring_degree > 1:
        raise ConfigError(
            "parallel.layout='striped' deals single tokens to ranks, and linear layers (model.layers) sum over runs of "
            "neighbours.\nTry parallel.layout='zigzag' (or contiguous or balanced)."
        )


def _problem(q: Tensor, k: Tensor, v: Tensor, share: int, mesh: Mesh) -> str | None:
    """What is wrong with this rank's tensors."""
    if q.shape[1] != share:
        return (
            f"rank {mesh.rank} was given {q.shape[1]} queries; its share of the layout is {share} tokens. "
            "Give it SequenceLayout.split of each."
        )
    try:
        check_tensors(q, k, v)
    except ConfigError as error:
        return str(error)
    return None


def bytes_received(
    layout: SequenceLayout,
    cu_seqlens: Sequence[int] | Tensor | None = None,
    *,
    num_kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    causal: bool = True,
    batch: int = 1,
    bytes_per_value: int = 4,
) -> int:
    """Bytes that each rank receives in a forward pass; they do not depend on how long the sequence is.

    ``bytes_per_value`` is 8 for float64 inputs, else 4. Backward receives as much in the other direction
    (``StatePlan.num_taken`` states a rank in place of ``num_given``).
    """
    plan = StatePlan.build(layout, cu_seqlens, causal=causal)
    state = batch * num_kv_heads * head_dim * ((head_dim if value_dim is None else value_dim) + 1)
    return (layout.degree - 1) * plan.num_given * state * bytes_per_value


class Open(NamedTuple):
    """A segment (neighbouring tokens of one document on one rank) whose document has other segments."""

    document: int
    start: int
    """Its first global token."""
    segment: int
    """Its number among its rank's segments."""


@dataclass(frozen=True)
class StatePlan:
    """Which states travel for one layout and one set of documents. Pure; the same on every rank."""

    layout: SequenceLayout
    cu_seqlens: tuple[int, ...]
    causal: bool
    ends: tuple[tuple[int, ...], ...]
    """For each rank the ends of its segments in local rows, from 0."""
    given: tuple[tuple[Open, ...], ...]
    """For each rank the segments whose state others need, in local (and global) order."""
    taken: tuple[tuple[Open, ...], ...]
    """For each rank the segments that need the state of others, in local (and global) order."""

    _known: dict = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def build(
        cls, layout: SequenceLayout, cu_seqlens: Sequence[int] | Tensor | None = None, *, causal: bool = True
    ) -> StatePlan:
        """The plan: if causal, a segment gives to the later segments of its document, else to all others.

        ConfigError when the layout deals single tokens, or when the documents do not fit it.
        """
        bounds = check_documents(cu_seqlens, layout.num_tokens)
        return _build_plan(layout, tuple(bounds), causal)

    @cached_property
    def digest(self) -> str:
        """A fingerprint: ranks that share a sequence must have the same one."""
        words = (self.layout.kind, self.layout.runs, self.layout.ulysses, self.cu_seqlens, self.causal)
        return blake2b(repr(words).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Layout and mask on one line."""
        x, kind = self.layout, "causal" if self.causal else "bidirectional"
        documents = len(self.cu_seqlens) - 1
        return f"{x.kind} layout of {x.num_tokens} tokens over {x.degree} ranks, {documents} documents, {kind}"

    def cached(self, key: Hashable, build: Callable[[], T]) -> T:
        """What ``build`` returned when it was first asked for under this key."""
        if key not in self._known:
            self._known[key] = build()
        return self._known[key]

    @property
    def num_given(self) -> int:
        """States that each rank sends in a forward pass: as many as the rank that has most of them."""
        return max(map(len, self.given))

    @property
    def num_taken(self) -> int:
        """Gradients of states that each rank sends in a backward pass."""
        return max(map(len, self.taken))

    def segments(self, rank: int) -> Segments:
        """The rank's segments, in the words of the one-device kernel."""
        takes, gives = (tuple(x.segment for x in side[rank]) for side in (self.taken, self.given))
        return Segments(self.ends[rank], takes, gives)


@lru_cache(maxsize=8)
def _build_plan(layout: SequenceLayout, cu_seqlens: tuple[int, ...], causal: bool) -> StatePlan:
    pieces = [_segments(layout, cu_seqlens, rank) for rank in range(layout.degree)]
    starts: dict[int, list[int]] = {}
    for document, start, _ in itertools.chain.from_iterable(pieces):
        starts.setdefault(document, []).append(start)
    reach = {document: (min(of), max(of)) for document, of in starts.items() if len(of) > 1}
    opened = [[Open(d, start, n) for n, (d, start, _) in enumerate(own) if d in reach] for own in pieces]
    given, taken = (
        tuple(tuple(x for x in own if not causal or x.start != reach[x.document][end]) for own in opened)
        for end in (1, 0)  # a document's last segment has no one to give to, its first no one to take from
    )
    ends = tuple(tuple(itertools.accumulate((stop - a for _, a, stop in own), initial=0)) for own in pieces)
    return StatePlan(layout, cu_seqlens, causal, ends, given, taken)


def _segments(layout: SequenceLayout, cu_seqlens: tuple[int, ...], rank: int) -> list[tuple[int, int, int]]:
    """The rank's rows as (document, start, stop) in global tokens; neighbouring runs of a document are one segment."""
    found: list[tuple[int, int, int]] = []
    for run in layout.rank_runs(rank):
        if run.step > 1 and run.count > 1:
            raise ConfigError(
                f"parallel.layout={layout.kind!r} deals single tokens; linear attention sums over runs of neighbours. "
                f"Use parallel.layout='contiguous' (or zigzag or balanced)."
            )
        at, document = run.start, bisect_right(cu_seqlens, run.start) - 1
        while at < run.stop:
            stop = min(run.stop, cu_seqlens[document + 1])
            if found and found[-1][0] == document and found[-1][2] == at:
                found[-1] = (document, found[-1][1], stop)
            elif at < stop:
                found.append((document, at, stop))
            at, document = stop, document + 1
    return found


@dataclass(frozen=True)
class _AllGather:
    """The exchange of states among a context group; each rank adds what it needs in the order of the sequence."""

    mesh: Mesh
    plan: StatePlan

    def carry(self, given_sBKDW: Tensor) -> Callable[[], Tensor]:
        """A segment takes the sum of its document's earlier segments (of all others, if not causal)."""
        return self._exchange(given_sBKDW, self.plan.given, self.plan.taken, before=True, after=not self.plan.causal)

    def carry_back(self, dtaken_sBKDW: Tensor) -> Callable[[], Tensor]:
        """A state that was given has the gradients of all segments that took it."""
        return self._exchange(dtaken_sBKDW, self.plan.taken, self.plan.given, before=not self.plan.causal, after=True)

    def _exchange(
        self,
        mine_sBKDW: Tensor,
        sent: tuple[tuple[Open, ...], ...],
        wanted: tuple[tuple[Open, ...], ...],
        *,
        before: bool,
        after: bool,
    ) -> Callable[[], Tensor]:
        """Start the gathering of what every rank sends; the result makes the sums that this rank wants."""
        slots, state = max(map(len, sent)), mine_sBKDW.shape[1:]
        padded = torch.cat((mine_sBKDW, mine_sBKDW.new_zeros(slots - len(mine_sBKDW), *state)))
        everything = padded.new_empty(self.mesh.context * slots, *state)
        group, described = self.mesh.context_group, f"rank {self.mesh.rank} gathering states of linear attention"
        work = guarded(lambda: dist.all_gather_into_tensor(everything, padded, group=group, async_op=True), described)
        own = wanted[self.mesh.context_rank]

        def finish() -> Tensor:
            guarded(work.wait, described)
            by_rank = everything.view(self.mesh.context, slots, *state)
            sums = padded.new_zeros(len(own), *state)  # which also kept the outgoing states alive until here
            if before:
                _add_running(sums, own, sent, by_rank, backwards=False)
            if after:
                _add_running(sums, own, sent, by_rank, backwards=True)
            return sums

        return finish


@dataclass(frozen=True)
class _Stashed:
    """An exchange whose first result is kept, and is the result when the layer is computed again."""

    exchange: StateExchange
    stash: Stash

    def carry(self, given_sBKDW: Tensor) -> Callable[[], Tensor]:
        known = self.stash.recall()
        if known is not None:
            return lambda: known[0]
        arriving = self.exchange.carry(given_sBKDW)

        def finish() -> Tensor:
            taken = arriving()
            self.stash.keep(taken)
            return taken

        return finish

    def carry_back(self, dtaken_sBKDW: Tensor) -> Callable[[], Tensor]:
        return self.exchange.carry_back(dtaken_sBKDW)


def _add_running(
    sums_sBKDW: Tensor,
    wanted: Sequence[Open],
    sent: Sequence[Sequence[Open]],
    states_PsBKDW: Tensor,
    *,
    backwards: bool,
) -> None:
    """Add to each wanted segment's sum the states of its document before it (after it), nearest last."""
    sign = -1 if backwards else 1
    sources: dict[int, list[tuple[int, int, int]]] = {x.document: [] for x in wanted}
    for rank, of_rank in enumerate(sent):
        for slot, x in enumerate(of_rank):
            if x.document in sources:
                sources[x.document].append((sign * x.start, rank, slot))
    totals: dict[int, Tensor] = {}
    for document, found in sources.items():
        found.sort(reverse=True)  # popped from the end
        totals[document] = torch.zeros_like(sums_sBKDW[0])
    for n in sorted(range(len(wanted)), key=lambda n: sign * wanted[n].start):
        document, start = wanted[n].document, sign * wanted[n].start
        while sources[document] and sources[document][-1][0] < start:
            _, rank, slot = sources[document].pop()
            totals[document] += states_PsBKDW[rank, slot]
        sums_sBKDW[n] += totals[document]
