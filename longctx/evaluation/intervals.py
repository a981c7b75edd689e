"""95 % intervals for mean scores, and for weighted sums over them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054
"""Two-sided 95 % quantile of the standard normal distribution."""
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean score with its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int
    """Number of samples."""
    method: str
    """Interval method: ``wilson``, ``bootstrap``, or ``sum`` over other estimates."""


def estimate(scores: Sequence[float]) -> Estimate:
    """Return the mean of scores from 0 to 1, with an interval.

    Use Wilson's interval if all scores are 0 or 1, or all are equal; otherwise bootstrap percentiles.
    """
    assert scores, "an estimate needs a sample"
    mean = math.fsum(scores) / len(scores)
    # A bootstrap over equal scores has zero width. Wilson's interval is conservative then: no score between 0 and 1
    # varies more.
    if all(score in (0.0, 1.0) for score in scores) or min(scores) == max(scores):
        # Also valid near 0 and 1 and for few samples, unlike a normal interval, which leaves the range.
        low, high = wilson(mean, len(scores))
        return Estimate(mean=mean, low=low, high=high, count=len(scores), method="wilson")
    low, high = bootstrap(scores)
    # With few and skewed scores, percentiles may exclude the mean itself.
    return Estimate(mean=mean, low=min(low, mean), high=max(high, mean), count=len(scores), method="bootstrap")


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval for a share of ``count`` samples."""
    denominator = 1 + _Z**2 / count
    middle = (share + _Z**2 / (2 * count)) / denominator
    half = _Z / denominator * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    # At the ends, rounding could exclude the share itself.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def bootstrap(scores: Sequence[float]) -> tuple[float, float]:
    """Return the mean's 2.5th and 97.5th percentiles over resamples; deterministic for equal scores."""
    values, counts = np.unique(np.asarray(scores, dtype=np.float64), return_counts=True)
    # Sample the count per distinct value: the same distribution as resampling one by one.
    sample_counts = np.random.default_rng(0).multinomial(len(scores), counts / len(scores), size=RESAMPLES)
    means = sample_counts @ values / len(scores)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def weighted_sum(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return the sum of weight × mean over independent estimates; weights must not be negative.

    The interval follows from theirs by Zou and Donner's method of variance estimates recovery: distances from mean to
    low and to high add in quadrature.
    """
    mean = math.fsum(weight * part.mean for weight, part in parts)
    # Each side separately: near 0 and 1 an interval is not symmetric.
    below = math.hypot(*(weight * (part.mean - part.low) for weight, part in parts))
    above = math.hypot(*(weight * (part.high - part.mean) for weight, part in parts))
    count = sum(part.count for _, part in parts)
    return Estimate(mean=mean, low=max(0.0, mean - below), high=min(1.0, mean + above), count=count, method="sum")
