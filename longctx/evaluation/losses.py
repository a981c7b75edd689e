"""Losses over full texts: sums and token counts by position and by distance, and the tokens that need far context.

A loss stays a sum and a count until the very end, so texts and bins of any size weigh as many tokens as they have.

Axes: T tokens in a text; the first has no loss, so losses are [T − 1].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from longctx.evaluation.intervals import RESAMPLES

KEY_GAIN, KEY_LOSS = 2.0, 2.0
"""LongPPL's thresholds in nats (arXiv 2410.23771, github.com/PKU-ML/LongPPL): α = 2 and β = −2."""


@dataclass(frozen=True, kw_only=True)
class LossBin:
    """Losses for some tokens in a text."""

    start: int
    stop: int
    nll: float
    """Sum of negative log-likelihoods, nats."""
    count: int
    """Number of tokens."""


@dataclass(frozen=True, kw_only=True)
class LossRow:
    """One text's loss. ``cells`` converts it to plain values, ``of_cells`` reads them back."""

    task: str
    length: int
    index: int
    document: str
    num_tokens: int
    """Tokens that have a loss."""
    nll: float
    """Sum over the tokens that count: all, or LongPPL's key tokens."""
    count: int
    by_position: tuple[LossBin, ...] = ()
    by_distance: tuple[LossBin, ...] = ()

    def cells(self) -> dict[str, Any]:
        """Return the values by column."""
        return asdict(self)

    @classmethod
    def of_cells(cls, cells: dict[str, Any]) -> LossRow:
        """Return the row with these cells."""
        bins = {name: tuple(LossBin(**part) for part in cells[name]) for name in ("by_position", "by_distance")}
        return cls(**{**cells, **bins})


@dataclass(frozen=True, kw_only=True)
class LossEstimate:
    """Mean loss over the tokens in several texts, with a 95 % interval."""

    loss: float
    low: float | None
    """None for a single text: its variation between texts is unknown."""
    high: float | None
    num_tokens: int
    num_texts: int

    @property
    def perplexity(self) -> float:
        """e^loss."""
        if self.loss > 700:
            return math.inf
        return math.exp(self.loss)


def text_row(task: str, length: int, index: int, document: str, ids: Sequence[int], nll: np.ndarray) -> LossRow:
    """Return a text's row, with every token counting."""
    return LossRow(
        task=task,
        length=length,
        index=index,
        document=document,
        num_tokens=len(nll),
        nll=float(nll.sum(dtype=np.float64)),
        count=len(nll),
        by_position=_binned(np.arange(len(nll)), nll),
        by_distance=_binned(compute_pair_gaps(ids), nll),
    )


def key_row(task: str, length: int, index: int, document: str, nll_full: np.ndarray, nll_near: np.ndarray) -> LossRow:
    """Return a text's LongPPL row, with only key tokens counting; both losses cover the same tokens."""
    is_key = key_tokens(nll_full, nll_near)
    return LossRow(
        task=task,
        length=length,
        index=index,
        document=document,
        num_tokens=len(nll_full),
        nll=float(nll_full[is_key].sum(dtype=np.float64)),
        count=int(is_key.sum()),
    )


def key_tokens(nll_full: np.ndarray, nll_near: np.ndarray) -> np.ndarray:
    """Return LongPPL's key tokens: far context gains over 2 nats, and the loss with it is below 2. Both are strict."""
    return (nll_near - nll_full > KEY_GAIN) & (nll_full < KEY_LOSS)


def near_windows(num_tokens: int, *, truncation: int, window: int) -> list[tuple[int, int]]:
    """Return (start, stop) for each read with near context; tokens from ``start + truncation`` on are compared.

    As in LongPPL, the last window is as long as the text allows.
    """
    starts = range(0, num_tokens - truncation, window)
    return [(start, min(start + truncation + window, num_tokens)) for start in starts]


def compute_pair_gaps(ids: Sequence[int]) -> np.ndarray:
    """Return, for each token after the first, the distance to its pair's previous occurrence; 0 without one."""
    last: dict[tuple[int, int], int] = {}
    intervals = np.zeros(max(0, len(ids) - 1), dtype=np.int64)
    # Only the latest occurrence counts: an induction head copies from there.
    for at in range(1, len(ids)):
        pair = ids[at - 1], ids[at]
        if pair in last:
            intervals[at - 1] = at - last[pair]
        last[pair] = at
    return intervals


def loss_over_texts(parts: Sequence[tuple[float, int]]) -> LossEstimate | None:
    """Return the token-weighted loss over each text's (sum, count); None if no token counts."""
    sums = np.array([nll for nll, _ in parts], dtype=np.float64)
    counts = np.array([count for _, count in parts], dtype=np.float64)
    if not counts.sum():
        return None
    loss = float(sums.sum() / counts.sum())
    low = high = None
    # Bootstrap over texts: tokens in one text are not independent samples.
    if (counts > 0).sum() > 1:
        sample_counts = np.random.default_rng(0).multinomial(
            len(parts), np.full(len(parts), 1 / len(parts)), size=RESAMPLES
        )
        totals = sample_counts @ counts
        # A resample may miss all texts that have such tokens.
        means = (sample_counts @ sums)[totals > 0] / totals[totals > 0]
        low, high = (float(value) for value in np.percentile(means, [2.5, 97.5]))
        low, high = min(low, loss), max(high, loss)
    return LossEstimate(loss=loss, low=low, high=high, num_tokens=int(counts.sum()), num_texts=int((counts > 0).sum()))


def loss_by_bin(rows: Iterable[LossRow], kind: str) -> list[tuple[int, int, LossEstimate]]:
    """Return (start, stop, loss) for each bin in ``by_position`` or ``by_distance`` over all rows, ascending."""
    parts: dict[int, list[tuple[float, int]]] = {}
    bin_ends: dict[int, int] = {}
    for row in rows:
        for part in getattr(row, kind):
            parts.setdefault(part.start, []).append((part.nll, part.count))
            # With several text lengths, the last bin reaches as far as the longest.
            bin_ends[part.start] = max(part.stop, bin_ends.get(part.start, 0))
    found = []
    for start in sorted(parts):
        estimate = loss_over_texts(parts[start])
        if estimate is not None:
            found.append((start, bin_ends[start], estimate))
    return found


def _binned(values: np.ndarray, nll: np.ndarray) -> tuple[LossBin, ...]:
    """Return sums and counts in bins starting at 0, 1, 2, 4, 8, …; bins without tokens are left out."""
    if not len(values):
        return ()
    # Powers of two: the bins are equally wide on a log axis.
    edges = np.array([0] + [2**n for n in range(int(values.max()).bit_length())])
    bins = np.searchsorted(edges, values, side="right") - 1
    sums = np.bincount(bins, weights=nll.astype(np.float64), minlength=len(edges))
    counts = np.bincount(bins, minlength=len(edges))
    stops = np.append(edges[1:], int(values.max()) + 1)
    return tuple(
        LossBin(start=int(edges[n]), stop=int(stops[n]), nll=float(sums[n]), count=int(counts[n]))
        for n in range(len(edges))
        if counts[n]
    )
