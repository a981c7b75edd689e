"""CachedLayout: tokens in a growing sequence whose keys are on this rank. Pure index arithmetic.

A prompt is processed in chunks that a ``SequenceLayout`` splits over the ranks. For tokens that every rank processes,
the keys are stored round-robin. New tokens follow all cached ones, so a rank's rows are in sequence order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import groupby

from parallel.layout.sequence import SequenceLayout, TokenRun, TokenRuns, num_parts


@dataclass(frozen=True)
class CachedLayout:
    """One rank's cached tokens."""

    num_tokens: int = 0
    """Tokens on all ranks."""
    runs: TokenRuns = ()
    """This rank's tokens, in row order."""

    def extended(self, num_tokens: int, runs: Iterable[TokenRun]) -> CachedLayout:
        """Return this layout with ``num_tokens`` more tokens, of which this rank stores ``runs``."""
        # New tokens follow all cached ones: only the last run can continue into them.
        return CachedLayout(self.num_tokens + num_tokens, (*self.runs[:-1], *merge_runs((*self.runs[-1:], *runs))))


def count_tokens(runs: Iterable[TokenRun]) -> int:
    """Return the number of tokens in the runs."""
    return sum(run.count for run in runs)


def merge_runs(runs: Iterable[TokenRun]) -> TokenRuns:
    """Merge neighbouring runs that continue each other."""
    found: list[TokenRun] = []
    for run in runs:
        if found and found[-1].step == run.step and found[-1].start + found[-1].count * run.step == run.start:
            found[-1] = found[-1]._replace(count=found[-1].count + run.count)
        else:
            found.append(run)
    return tuple(found)


def tokens_from(runs: Iterable[TokenRun], first: int) -> TokenRuns:
    """Return the runs without tokens before ``first``."""
    cut = []
    for run in runs:
        missing = max(0, -((run.start - first) // run.step))
        if missing < run.count:
            cut.append(TokenRun(run.start + missing * run.step, run.count - missing, run.step))
    return tuple(cut)


def by_step(runs: Iterable[TokenRun]) -> Iterator[tuple[int, TokenRuns]]:
    """Group neighbouring runs with equal step; yield (first row, runs) per group."""
    row = 0
    for _, group in groupby(runs, key=lambda run: run.step):
        same = tuple(group)
        yield row, same
        row += count_tokens(same)


def round_robin_runs(start: int, num_tokens: int, rank: int, degree: int) -> TokenRuns:
    """Return a rank's round-robin portion of tokens [start, start + num_tokens): those equal to it modulo degree."""
    first = start + (rank - start) % degree
    count = -((first - start - num_tokens) // degree)
    if count <= 0:
        return ()
    return (TokenRun(first, count, degree),)


def chunk_runs(layout: SequenceLayout, start: int, rank: int) -> TokenRuns:
    """Return a rank's tokens in a chunk that starts at token ``start`` and is split by ``layout``."""
    return tuple(run._replace(start=start + run.start) for run in layout.rank_runs(rank))


def chunk_sizes(num_tokens: int, chunk_tokens: int, kind: str, degree: int, ulysses: int) -> Iterator[tuple[int, bool]]:
    """Yield (tokens, True if they are split over the ranks) for each chunk in a prompt.

    Chunks divide into the layout's parts. The last chunk holds the remaining tokens, at least one, and is not split: so
    every rank has the prompt's last token, and prompts may have any length.
    """
    if degree == 1:
        for start in range(0, num_tokens, chunk_tokens):
            yield min(chunk_tokens, num_tokens - start), False
        return
    parts = num_parts(kind, degree, ulysses)
    size = max(chunk_tokens // parts, 1) * parts
    while num_tokens > parts:
        # Leave at least one token for the last chunk.
        tokens = min(size, (num_tokens - 1) // parts * parts)
        yield tokens, True
        num_tokens -= tokens
    if num_tokens:
        yield num_tokens, False


@dataclass(frozen=True)
class ChunkPlacement:
    """Placement of a chunk's new tokens, and the tokens before them."""

    prefix: CachedLayout
    num_tokens: int
    """New tokens, on all ranks."""
    degree: int
    """Ranks that share the sequence."""
    layout: SequenceLayout | None
    """How ranks split the new tokens; None if every rank gets all."""

    @property
    def stop(self) -> int:
        """Number of tokens in the sequence up to and including the chunk."""
        return self.prefix.num_tokens + self.num_tokens

    def given(self, rank: int) -> TokenRuns:
        """Return the new tokens that a rank processes, in local order."""
        start = self.prefix.num_tokens
        if self.layout is None:
            return (TokenRun(start, self.num_tokens, 1),)
        return chunk_runs(self.layout, start, rank)

    def stored(self, rank: int) -> TokenRuns:
        """Return the new tokens that a rank stores in its cache."""
        if self.layout is None:
            return round_robin_runs(self.prefix.num_tokens, self.num_tokens, rank, self.degree)
        return self.given(rank)

    def after(self, rank: int) -> CachedLayout:
        """Return a rank's cached layout after the chunk."""
        return self.prefix.extended(self.num_tokens, self.stored(rank))

    @property
    def digest(self) -> str:
        """Checksum, equal on all ranks that share a sequence."""
        return blake2b(self.describe().encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Return a one-line summary."""
        split = "replicated on every rank"
        if self.layout is not None:
            split = f"split {self.layout.kind} over {self.degree} ranks (ulysses {self.layout.ulysses})"
        return f"cached sequence, tokens {self.prefix.num_tokens} to {self.stop}, {split}"
