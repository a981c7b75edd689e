"""StatePlan: which linear-attention states travel."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from torch import Tensor

from longctx.documents import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.linear_attention import Segments
from parallel.layout.sequence import SequenceLayout


def bytes_received(
    layout: SequenceLayout,
    cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None = None,
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
    if value_dim is None:
        value_dim = head_dim
    state = batch * num_kv_heads * head_dim * (value_dim + 1)
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

    @classmethod
    def build(
        cls,
        layout: SequenceLayout,
        cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None = None,
        *,
        causal: bool = True,
    ) -> StatePlan:
        """The plan: if causal, a segment gives to the later segments of its document, else to all others.

        ConfigError when the layout deals single tokens, or when the documents do not fit it.
        """
        documents = PackedDocuments.of(cu_seqlens, layout.num_tokens)
        return _build_plan(layout, documents.bounds, causal)

    @property
    def digest(self) -> str:
        """A fingerprint: ranks that share a sequence must have the same one."""
        inputs = (self.layout.kind, self.layout.runs, self.layout.ulysses, self.cu_seqlens, self.causal)
        return blake2b(repr(inputs).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Layout and mask on one line."""
        x, kind = self.layout, "bidirectional"
        if self.causal:
            kind = "causal"
        documents = len(self.cu_seqlens) - 1
        return f"{x.kind} layout of {x.num_tokens} tokens over {x.degree} ranks, {documents} documents, {kind}"

    @property
    def num_given(self) -> int:
        """States that each rank sends in a forward pass: as many as the rank that has most of them."""
        return max(map(len, self.given))

    @property
    def num_taken(self) -> int:
        """Gradients of states that each rank sends in a backward pass."""
        return max(map(len, self.taken))

    def segments(self, rank: int) -> Segments:
        """The rank's segments, as the one-device kernel takes them."""
        takes, gives = (tuple(x.segment for x in side[rank]) for side in (self.taken, self.given))
        return Segments(PackedDocuments.of(self.ends[rank]), takes, gives)


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
