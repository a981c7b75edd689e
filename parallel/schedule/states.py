"""StatePlan: which linear-attention states ranks send."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from longctx.kernels.linear_attention import StateSegments
from parallel.layout.sequence import SequenceLayout


class SplitSegment(NamedTuple):
    """Segment (neighbouring tokens from one document on one rank) whose document has other segments."""

    document: int
    start: int
    """First global token."""
    segment: int
    """Index among the rank's segments."""


class StateSource(NamedTuple):
    """Segment for which a rank sends data."""

    start: int
    """First global token."""
    rank: int
    slot: int
    """Index among the rank's sent segments."""
    num_tokens: int


@dataclass(frozen=True)
class StatePlan:
    """Linear-attention states to send for one layout and one set of documents. Pure; equal on every rank."""

    layout: SequenceLayout
    cu_seqlens: tuple[int, ...]
    causal: bool
    ends: tuple[tuple[int, ...], ...]
    """Per rank, segment ends in local rows, from 0."""
    given: tuple[tuple[SplitSegment, ...], ...]
    """Per rank, segments whose state other segments need, in local (and global) order."""
    taken: tuple[tuple[SplitSegment, ...], ...]
    """Per rank, segments that need other segments' states, in local (and global) order."""

    @classmethod
    def build(
        cls,
        layout: SequenceLayout,
        cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None = None,
        *,
        causal: bool = True,
    ) -> StatePlan:
        """Build the plan: if causal, a segment sends to later segments in its document, otherwise to all others.

        Raise ConfigError if the layout assigns single tokens, or if the documents do not fit it.
        """
        documents = PackedDocuments.of(cu_seqlens, layout.num_tokens)
        return _build_plan(layout, documents.bounds, causal)

    @property
    def digest(self) -> str:
        """Checksum, equal on all ranks that share a sequence."""
        inputs = (self.layout.kind, self.layout.runs, self.layout.ulysses, self.cu_seqlens, self.causal)
        return blake2b(repr(inputs).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Return a one-line summary with layout and mask."""
        layout = self.layout
        kind = "bidirectional"
        if self.causal:
            kind = "causal"
        return (
            f"{layout.kind} layout, {layout.num_tokens} tokens over {layout.degree} ranks, "
            f"{len(self.cu_seqlens) - 1} documents, {kind}"
        )

    @property
    def num_given(self) -> int:
        """Number of states that every rank sends in a forward pass: the maximum over ranks."""
        return max(map(len, self.given))

    def length(self, rank: int, segment: int) -> int:
        """Return the token count of a rank's segment."""
        return self.ends[rank][segment + 1] - self.ends[rank][segment]

    def sources(self, document: int, sent: Sequence[Sequence[SplitSegment]]) -> list[StateSource]:
        """Return a document's segments among the sent ones, in sequence order."""
        sources = []
        for rank, of_rank in enumerate(sent):
            for slot, x in enumerate(of_rank):
                if x.document == document:
                    sources.append(StateSource(x.start, rank, slot, self.length(rank, x.segment)))
        return sorted(sources)

    def rows_before(self, x: SplitSegment, num_rows: int) -> list[tuple[StateSource, int, int]]:
        """Return the segments that hold the ``num_rows`` tokens before ``x``, as (source, tokens, tokens between it and
        ``x``).

        The nearest comes first. They hold fewer tokens if the document starts within ``num_rows``.
        """
        rows, between = [], 0
        for source in reversed(self.sources(x.document, self.given)):
            if source.start < x.start and between < num_rows:
                count = min(source.num_tokens, num_rows - between)
                rows.append((source, count, between))
                between += count
        return rows

    def segments(self, rank: int) -> StateSegments:
        """Return the rank's segments in the single-device kernel's format."""
        received_segments = tuple(x.segment for x in self.taken[rank])
        sent_segments = tuple(x.segment for x in self.given[rank])
        return StateSegments(PackedDocuments.of(self.ends[rank]), received_segments, sent_segments)


class _Segment(NamedTuple):
    """Neighbouring tokens from one document on one rank."""

    document: int
    start: int
    """First global token."""
    stop: int


def _build_plan(layout: SequenceLayout, cu_seqlens: tuple[int, ...], causal: bool) -> StatePlan:
    by_rank = [_segments(layout, cu_seqlens, rank) for rank in range(layout.degree)]
    starts: dict[int, list[int]] = {}
    for segment in itertools.chain.from_iterable(by_rank):
        starts.setdefault(segment.document, []).append(segment.start)
    first = {document: min(of) for document, of in starts.items()}
    last = {document: max(of) for document, of in starts.items()}

    given: list[tuple[SplitSegment, ...]] = []
    taken: list[tuple[SplitSegment, ...]] = []
    ends: list[tuple[int, ...]] = []
    for own in by_rank:
        # A document within one segment needs no remote state.
        split_segments = [
            SplitSegment(x.document, x.start, n) for n, x in enumerate(own) if len(starts[x.document]) > 1
        ]
        # If causal, a document's last segment sends its state to no segment, and its first receives from no segment.
        given.append(tuple(x for x in split_segments if not causal or x.start != last[x.document]))
        taken.append(tuple(x for x in split_segments if not causal or x.start != first[x.document]))
        ends.append(tuple(itertools.accumulate((x.stop - x.start for x in own), initial=0)))
    return StatePlan(layout, cu_seqlens, causal, ends=tuple(ends), given=tuple(given), taken=tuple(taken))


def _segments(layout: SequenceLayout, cu_seqlens: tuple[int, ...], rank: int) -> list[_Segment]:
    """Return the rank's rows as segments; merge neighbouring token spans in one document."""
    found: list[_Segment] = []
    for run in layout.rank_runs(rank):
        if run.step > 1 and run.count > 1:
            raise ConfigError(
                f"parallel.layout={layout.kind!r} assigns single tokens to ranks; linear attention sums over "
                f"consecutive tokens. Use parallel.layout='contiguous' (or zigzag or balanced)."
            )
        # Cut the span at document boundaries; empty documents yield no segment.
        start, document = run.start, bisect_right(cu_seqlens, run.start) - 1
        while start < run.stop:
            stop = min(run.stop, cu_seqlens[document + 1])
            if found and found[-1].document == document and found[-1].stop == start:
                found[-1] = found[-1]._replace(stop=stop)
            elif start < stop:
                found.append(_Segment(document, start, stop))
            start, document = stop, document + 1
    return found
