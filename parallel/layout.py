"""``SequenceLayout``: which token of a sequence lives on which rank. Pure index arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.errors import ConfigError

Ranges = tuple[tuple[int, int], ...]
"""Half-open [start, stop) ranges of rows, ascending and disjoint."""

KINDS = ("contiguous", "zigzag")


@dataclass(frozen=True)
class SequenceLayout:
    """Every token of a sequence dealt to one of ``degree`` ranks, in ascending ranges.

    A rank's local rows are its ranges one after another, so local order is global order.
    """

    kind: str
    num_tokens: int
    degree: int
    ranges: tuple[Ranges, ...]
    """For each rank its global [start, stop) ranges."""

    @classmethod
    def build(
        cls,
        kind: str,
        num_tokens: int,
        degree: int,
        cu_seqlens: Sequence[int] | Tensor | None = None,
        ulysses: int = 1,
    ) -> SequenceLayout:
        """The layout of ``num_tokens`` tokens over ``degree`` ranks.

        ``contiguous`` gives rank r the r-th of ``degree`` equal parts. ``zigzag`` cuts 2·degree equal parts and gives
        rank r the r-th from either end, which evens out causal attention over one document. Neither depends on
        ``cu_seqlens``. ConfigError when the tokens do not divide.
        """
        del cu_seqlens  # equal parts, whatever the documents
        check_layout(kind, num_tokens, degree, ulysses)
        if kind == "contiguous" or degree == 1:
            share = num_tokens // degree
            ranges = [((r * share, (r + 1) * share),) for r in range(degree)]
        else:
            part = num_tokens // (2 * degree)
            ends = [(r, 2 * degree - 1 - r) for r in range(degree)]
            ranges = [tuple((p * part, (p + 1) * part) for p in pair) for pair in ends]
        return cls(kind, num_tokens, degree, tuple(tuple(r) for r in ranges))

    def num_local(self, rank: int) -> int:
        """Tokens on a rank."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def split(self, x: Tensor, rank: int, dim: int) -> Tensor:
        """The rank's share of a per-token tensor, cut along ``dim``."""
        if x.shape[dim] != self.num_tokens:
            raise ValueError(
                f"dim {dim} of shape {tuple(x.shape)} is not the layout's {self.num_tokens} tokens; "
                "flatten the rows of a batch before splitting"
            )
        return torch.cat([x.narrow(dim, start, stop - start) for start, stop in self.ranges[rank]], dim)

    def join(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """The whole tensor from every rank's share: the inverse of ``split``."""
        pieces: list[tuple[int, Tensor]] = []
        for ranges, part in zip(self.ranges, parts, strict=True):
            cuts = part.split([stop - start for start, stop in ranges], dim)
            pieces += [(start, cut) for (start, _), cut in zip(ranges, cuts, strict=True)]
        return torch.cat([cut for _, cut in sorted(pieces, key=lambda p: p[0])], dim)


def check_layout(kind: str, num_tokens: int, degree: int, ulysses: int = 1) -> None:
    """ConfigError unless such a layout exists; says the nearest token counts that work."""
    if kind in ("striped", "balanced"):
        raise ConfigError(f"parallel.layout={kind!r} is not built yet. Use one of {list(KINDS)}.")
    if kind not in KINDS:
        raise ConfigError(f"parallel.layout={kind!r} is unknown. Try one of {list(KINDS)}.")
    if ulysses != 1:
        raise ConfigError(f"parallel.ulysses={ulysses}: splitting heads is not built yet. Use parallel.ulysses=1.")
    if degree < 1 or num_tokens < 1:
        raise ConfigError(f"a layout needs tokens and ranks; got {num_tokens} tokens over {degree} ranks.")
    parts = degree if kind == "contiguous" or degree == 1 else 2 * degree
    if num_tokens % parts:
        below = num_tokens // parts * parts
        nearest = [str(n) for n in (below, below + parts) if n]
        raise ConfigError(
            f"{num_tokens} tokens do not split into {parts} equal parts "
            f"(parallel.context={degree}, parallel.layout={kind}).\n"
            f"Try {' or '.join(nearest)} tokens (data.seq_len × train.micro_batch_rows)."
        )
