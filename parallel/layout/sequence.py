"""``SequenceLayout``: placement of a sequence's tokens on ranks. Pure index arithmetic.

``degree`` = ring degree × Ulysses degree ranks share a sequence, with rank = ring rank · ulysses + Ulysses rank. Each
ring rank holds different tokens. These are cut into ``ulysses`` equal consecutive parts, so that an all-to-all over
heads gives every Ulysses rank all the ring rank's tokens, in order, for its portion of the heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.batch import PackedDocuments
from longctx.errors import ConfigError
from parallel.layout.balanced import assign_tokens
from parallel.layout.zigzag import Pieces, head_and_tail

KINDS = ("contiguous", "zigzag", "striped", "balanced")


class TokenRun(NamedTuple):
    """Evenly spaced tokens that are neighbours on one rank: start, start + step, … (``count`` tokens)."""

    start: int
    count: int  # pyright: ignore[reportIncompatibleMethodOverride]
    step: int
    """Distance in tokens between neighbours: 1, or the ring degree in striped layouts."""

    @property
    def stop(self) -> int:
        """Index one past the last token."""
        return self.start + (self.count - 1) * self.step + 1


TokenRuns = tuple[TokenRun, ...]
"""Ascending, disjoint runs."""


@dataclass(frozen=True)
class SequenceLayout:
    """Assignment of every token in a sequence to one of ``degree`` ranks, equally many to each.

    A ring rank's local rows are its runs, concatenated, so local order is global order.
    """

    kind: str
    num_tokens: int
    degree: int
    """Ranks that share the sequence, ring × Ulysses."""
    ulysses: int
    """Consecutive ranks that share one ring rank's rows."""
    runs: tuple[TokenRuns, ...]
    """Runs per ring rank."""

    @classmethod
    def build(
        cls,
        kind: str,
        num_tokens: int,
        degree: int,
        cu_seqlens: Sequence[int] | Tensor | PackedDocuments | None = None,
        ulysses: int = 1,
        *,
        causal: bool = True,
    ) -> SequenceLayout:
        """Build the layout for ``num_tokens`` tokens over ``degree`` ranks.

        With R = degree / ulysses ring ranks: ``contiguous`` cuts R equal parts, and ring rank r gets the r-th.
        ``zigzag`` cuts 2·R equal parts, and ring rank r gets the r-th from either end, which balances causal attention
        over one document. ``striped`` assigns every R-th token, from token r. ``balanced`` assigns chunks so that
        attention within the documents that end at ``cu_seqlens`` (default: one document), ``causal`` or bidirectional,
        is even and few rows are sent (``parallel/layout/balanced.py``). The other kinds only validate the documents.
        Raise ConfigError if the tokens do not divide, or if the documents do not ascend from 0 to ``num_tokens``.
        """
        check_layout(kind, num_tokens, degree, ulysses)
        documents = PackedDocuments.of(cu_seqlens, num_tokens)
        ring_degree = degree // ulysses
        if kind == "balanced" and ring_degree > 1:
            runs = _runs_of(assign_tokens(num_tokens, ring_degree, documents.bounds, causal=causal))
        else:
            runs = _fixed_runs(kind, num_tokens, ring_degree)
        return cls(kind, num_tokens, degree, ulysses, runs)

    @property
    def ring_degree(self) -> int:
        """Number of ring ranks: the shards into which the sequence itself is cut."""
        return self.degree // self.ulysses

    def num_ring(self, ring_rank: int) -> int:
        """Return a ring rank's token count, over all its Ulysses ranks."""
        return sum(run.count for run in self.runs[ring_rank])

    def num_local(self, rank: int) -> int:
        """Return the rank's token count."""
        return self.num_ring(rank // self.ulysses) // self.ulysses

    def rank_runs(self, rank: int) -> TokenRuns:
        """Return one rank's runs: its ring rank's runs, cut to this rank's portion of the rows."""
        ring_rank, part = divmod(rank, self.ulysses)
        if self.ulysses == 1:
            return self.runs[ring_rank]
        num_rows = self.num_local(rank)
        return _cut_rows(self.runs[ring_rank], part * num_rows, (part + 1) * num_rows)

    def indices(self, rank: int) -> Tensor:
        """Return a rank's global token indices (int64) in local order."""
        return torch.cat([torch.arange(run.start, run.stop, run.step) for run in self.rank_runs(rank)])

    def split(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """Return a copy of the rank's shard of a per-token tensor, cut along ``dim``."""
        if x.shape[dim] != self.num_tokens:
            raise ValueError(
                f"dim {dim} of shape {tuple(x.shape)} does not match the layout's {self.num_tokens} tokens; "
                "flatten the batch rows before splitting"
            )
        dim %= x.dim()
        parts = []
        for run in self.rank_runs(rank):
            # Slice instead of index: a run is one memory region (or one stride), and there are few runs.
            index = [slice(None)] * dim
            index.append(slice(run.start, run.stop, run.step))
            parts.append(x[tuple(index)])
        return torch.cat(parts, dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """Concatenate all ranks' shards into the full tensor: the inverse of ``split``."""
        assert len(parts) == self.degree, f"{len(parts)} parts for {self.degree} ranks"
        dim %= parts[0].dim()
        if self.kind == "striped":
            # Token n is row n // ring on ring rank n % ring: rows as the outer dim and ring ranks as the inner one give
            # token order.
            u = self.ulysses
            rings = [torch.cat(list(parts[first : first + u]), dim) for first in range(0, self.degree, u)]
            return torch.stack(rings, dim + 1).flatten(dim, dim + 1)
        # Runs are contiguous tokens here: sorted by their first token, they form the sequence.
        pieces: list[tuple[int, Tensor]] = []
        for rank, part in enumerate(parts):
            runs = self.rank_runs(rank)
            run_parts = part.split([run.count for run in runs], dim)
            pieces += [(run.start, cut) for run, cut in zip(runs, run_parts, strict=True)]
        return torch.cat([cut for _, cut in sorted(pieces, key=lambda p: p[0])], dim)


# Every micro-batch has the same length; validation may add a second one.
@functools.lru_cache(maxsize=16)
def _fixed_runs(kind: str, num_tokens: int, degree: int) -> tuple[TokenRuns, ...]:
    """Build the runs for each of ``degree`` ring ranks, for kinds that do not depend on documents."""
    if kind == "zigzag" and degree > 1:
        return _runs_of(head_and_tail(num_tokens, degree))
    tokens_per_rank = num_tokens // degree
    if kind == "striped":
        return tuple((TokenRun(rank, tokens_per_rank, degree),) for rank in range(degree))
    return tuple((TokenRun(rank * tokens_per_rank, tokens_per_rank, 1),) for rank in range(degree))


def _runs_of(assigned: Iterable[Pieces]) -> tuple[TokenRuns, ...]:
    return tuple(tuple(TokenRun(start, count, 1) for start, count in pieces) for pieces in assigned)


def _cut_rows(runs: TokenRuns, start: int, stop: int) -> TokenRuns:
    """Return the runs that cover local rows [start, stop)."""
    cut, row = [], 0
    for run in runs:
        first, last = max(start - row, 0), min(stop - row, run.count)
        if first < last:
            cut.append(TokenRun(run.start + first * run.step, last - first, run.step))
        row += run.count
    return tuple(cut)


def check_layout(kind: str, num_tokens: int, degree: int, ulysses: int = 1) -> None:
    """Raise ConfigError, with the nearest valid values, unless such a layout exists."""
    if kind not in KINDS:
        raise ConfigError(f"parallel.layout={kind!r} is unknown. Try one of {list(KINDS)}.")
    check_division(kind, num_tokens, degree, ulysses)


def num_parts(kind: str, degree: int, ulysses: int = 1) -> int:
    """Return the number of equal parts into which a layout over ``degree`` ranks cuts the tokens."""
    ring = degree // ulysses
    if kind == "zigzag" and ring > 1:
        return math.lcm(2 * ring, degree)
    return degree


def check_division(kind: str, num_tokens: int, degree: int, ulysses: int = 1) -> None:
    """Raise ConfigError, with the nearest valid values, unless the tokens split into the layout's parts."""
    if degree < 1 or num_tokens < 1:
        raise ConfigError(f"a layout needs tokens and ranks; got {num_tokens} tokens over {degree} ranks.")
    if ulysses < 1 or degree % ulysses:
        works = [u for u in range(1, degree + 1) if degree % u == 0]
        nearest = min(works, key=lambda u: (abs(u - ulysses), u))
        raise ConfigError(
            f"parallel.ulysses={ulysses} does not divide parallel.context={degree}: the ranks that share a sequence "
            f"are ring × Ulysses.\nTry parallel.ulysses={nearest}."
        )
    parts = num_parts(kind, degree, ulysses)
    if num_tokens % parts:
        below = num_tokens // parts * parts
        nearest = [str(n) for n in (below, below + parts) if n]
        settings = f"parallel.context={degree}, parallel.layout={kind}"
        if ulysses > 1:
            settings += f", parallel.ulysses={ulysses}"
        raise ConfigError(
            f"{num_tokens} tokens do not split into {parts} equal parts ({settings}).\n"
            f"Try {' or '.join(nearest)} tokens (data.seq_len × train.micro_batch_rows)."
        )
