"""Figures of an expert load: how many tokens chose each expert of a layer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any


def max_over_mean(counts: Sequence[float]) -> float:
    """Tokens of the busiest expert over the mean, ``max / (sum / E)``: 1.0 is even, E / top-k the worst.

    With experts spread over devices this is how much longer the slowest one computes. NaN when no token was routed.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return max(counts) * len(counts) / total


def max_violation(counts: Sequence[float]) -> float:
    """How far the busiest expert lies above the mean: ``max / mean − 1``, 0 when even (arXiv 2408.15664: MaxVio)."""
    return max_over_mean(counts) - 1


def mean_violation(counts: Sequence[float]) -> float:
    """How far experts lie from the mean, on average: ``Σ |counts[e] − mean| / (E · mean)``, 0 when even.

    Half of it is the share of tokens that another expert would have to take. NaN when no token was routed.
    """
    total = sum(counts)
    if not total:
        return math.nan
    return sum(abs(count - total / len(counts)) for count in counts) / total


def idle_share(counts: Sequence[float]) -> float:
    """Share of experts that got no token: ``#{e: counts[e] = 0} / E``."""
    if not counts:
        return math.nan
    return sum(1 for count in counts if count == 0) / len(counts)


def load_entropy(counts: Sequence[float]) -> float:
    """``−Σ p·ln p`` in nats with ``p = counts / sum``: ln E is even, ln top-k the worst."""
    total = sum(counts)
    if not total:
        return math.nan
    # + 0.0 turns the −0.0 of a load on one expert into 0.0.
    return -sum(p * math.log(p) for p in (count / total for count in counts) if p > 0) + 0.0


def layer_numbers(record: Mapping[str, Any]) -> list[int]:
    """The layer of each row of ``expert_load``: ``expert_layers``, or the rows counted where a record lacks it."""
    return record.get("expert_layers") or list(range(len(record.get("expert_load") or [])))


DEAD_AFTER_STEPS = 50
"""Steps in a row without a token after which an expert is called dead."""


def expert_name(layer: int, expert: int) -> str:
    """The expert as its weights are named: ``model.layers.3.mlp.experts.7``."""
    return f"model.layers.{layer}.mlp.experts.{expert}"


def worst_max_over_mean(expert_load: Sequence[Sequence[float]]) -> float | None:
    """``max_over_mean`` of the least even layer; None for a dense model or when nothing was routed."""
    figures = [max_over_mean(layer) for layer in expert_load if sum(layer)]
    return max(figures, default=None)
