"""StatePlan: the linear-attention states that are sent."""

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
from longctx.kernels.linear_attention import Segments
from parallel.layout.sequence import SequenceLayout


class Open(NamedTuple):
    """Segment (neighbouring tokens of one document on one rank) whose document has other segments."""

    document: int
    start: int
    """Its first global token."""
    segment: int
    """Its number among its rank's segments."""


class Source(NamedTuple):
    """Segment of which a rank sends data."""

    start: int
    """Its first global token."""
    rank: int
    slot: int
    """Its number among those that the rank sends."""
    num_tokens: int


@dataclass(frozen=True)
class StatePlan:
    """States that are sent for one layout and one set of documents. Pure; the same on every rank."""

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
        """Build the plan: if causal, a segment gives to the later segments of its document, else to all others.

        Raise ConfigError if the layout deals single tokens, or if the documents do not fit it.
        """
        documents = PackedDocuments.of(cu_seqlens, layout.num_tokens)
        return _build_plan(layout, documents.bounds, causal)

    @property
    def digest(self) -> str:
        """Fingerprint, which must be the same on all ranks that share a sequence."""
        inputs = (self.layout.kind, self.layout.runs, self.layout.ulysses, self.cu_seqlens, self.causal)
        return blake2b(repr(inputs).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Return layout and mask on one line."""
        layout = self.layout
        kind = "bidirectional"
        if self.causal:
            kind = "causal"
        return (
            f"{layout.kind} layout of {layout.num_tokens} tokens over {layout.degree} ranks, "
            f"{len(self.cu_seqlens) - 1} documents, {kind}"
        )

    @property
    def num_given(self) -> int:
        """Number of states that each rank sends in a forward pass: as many as the rank that has most of them."""
        return max(map(len, self.given))

    def length(self, rank: int, segment: int) -> int:
        """Return the number of tokens of a rank's segment."""
        return self.ends[rank][segment + 1] - self.ends[rank][segment]

    def sources(self, document: int, sent: Sequence[Sequence[Open]]) -> list[Source]:
        """Return the segments of a document among those that ranks send, in the order of the sequence."""
        sources = []
        for rank, of_rank in enumerate(sent):
            for slot, x in enumerate(of_rank):
                if x.document == document:
                    sources.append(Source(x.start, rank, slot, self.length(rank, x.segment)))
        return sorted(sources)

    def rows_before(self, x: Open, reach: int) -> list[tuple[Source, int, int]]:
        """Return the segments with the ``reach`` tokens before ``x``, each with its number of tokens and of those
        between.

        The nearest comes first. There are fewer tokens if the document begins later.
        """
        rows, between = [], 0
        for source in reversed(self.sources(x.document, self.given)):
            if source.start < x.start and between < reach:
                count = min(source.num_tokens, reach - between)
                rows.append((source, count, between))
                between += count
        return rows

    def segments(self, rank: int) -> Segments:
        """Return the rank's segments, as the one-device kernel takes them."""
        takes = tuple(x.segment for x in self.taken[rank])
        gives = tuple(x.segment for x in self.given[rank])
        return Segments(PackedDocuments.of(self.ends[rank]), takes, gives)


class _Segment(NamedTuple):
    """Neighbouring tokens of one document on one rank."""

    document: int
    start: int
    """Its first global token."""
    stop: int


def _build_plan(layout: SequenceLayout, cu_seqlens: tuple[int, ...], causal: bool) -> StatePlan:
    by_rank = [_segments(layout, cu_seqlens, rank) for rank in range(layout.degree)]
    starts: dict[int, list[int]] = {}
    for segment in itertools.chain.from_iterable(by_rank):
        starts.setdefault(segment.document, []).append(segment.start)
    first = {document: min(of) for document, of in starts.items()}
    last = {document: max(of) for document, of in starts.items()}

    given: list[tuple[Open, ...]] = []
    taken: list[tuple[Open, ...]] = []
    ends: list[tuple[int, ...]] = []
    for own in by_rank:
        # A document within one segment needs no state of another.
        opened = [Open(x.document, x.start, n) for n, x in enumerate(own) if len(starts[x.document]) > 1]
        # If causal, a document's last segment gives to no other, and its first takes from no other.
        given.append(tuple(x for x in opened if not causal or x.start != last[x.document]))
        taken.append(tuple(x for x in opened if not causal or x.start != first[x.document]))
        ends.append(tuple(itertools.accumulate((x.stop - x.start for x in own), initial=0)))
    return StatePlan(layout, cu_seqlens, causal, ends=tuple(ends), given=tuple(given), taken=tuple(taken))


def _segments(layout: SequenceLayout, cu_seqlens: tuple[int, ...], rank: int) -> list[_Segment]:
    """Return the rank's rows as segments; neighbouring runs of a document are one."""
    found: list[_Segment] = []
    for run in layout.rank_runs(rank):
        if run.step > 1 and run.count > 1:
            raise ConfigError(
                f"parallel.layout={layout.kind!r} deals single tokens; linear attention sums over runs of neighbours. "
                f"Use parallel.layout='contiguous' (or zigzag or balanced)."
            )
        # The run is cut at the boundaries of documents; empty documents on the way give no segment.
        start, document = run.start, bisect_right(cu_seqlens, run.start) - 1
        while start < run.stop:
            stop = min(run.stop, cu_seqlens[document + 1])
            if found and found[-1].document == document and found[-1].stop == start:
                found[-1] = found[-1]._replace(stop=stop)
            elif start < stop:
                found.append(_Segment(document, start, stop))
            start, document = stop, document + 1
    return found
