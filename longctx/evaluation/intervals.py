"""95 % intervals for means of scores, and for weighted sums of such means."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_Z = 1.959963984540054
"""Standard deviations of a normal distribution that hold 95 % of it on both sides."""
RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean of scores with its 95 % interval."""

    mean: float
    low: float
    high: float
    count: int
    """Samples that it is the mean of."""
    method: str
    """How the interval was found: ``wilson``, ``bootstrap``, or ``sum`` of other estimates."""


def estimate(scores: Sequence[float]) -> Estimate:
    """Return the mean of scores from 0 to 1, with an interval.

    Use Wilson's interval if all scores are 0 or 1, or all are equal; otherwise the bootstrap's percentiles. A bootstrap
    of equal scores has zero width, and Wilson's is conservative then: no score between 0 and 1 varies more.
    """
    assert scores, "an estimate needs a sample"
    mean = math.fsum(scores) / len(scores)
    if all(score in (0.0, 1.0) for score in scores) or min(scores) == max(scores):
        # Also valid near 0 and 1 and for few samples, where a normal interval leaves the range.
        low, high = wilson(mean, len(scores))
        return Estimate(mean=mean, low=low, high=high, count=len(scores), method="wilson")
    low, high = bootstrap(scores)
    # For few and skewed scores, percentiles may exclude the mean itself.
    return Estimate(mean=mean, low=min(low, mean), high=max(high, mean), count=len(scores), method="bootstrap")


def wilson(share: float, count: int) -> tuple[float, float]:
    """Return Wilson's score interval for a share of ``count`` samples."""
    denominator = 1 + _Z**2 / count
    middle = (share + _Z**2 / (2 * count)) / denominator
    half = _Z / denominator * math.sqrt(share * (1 - share) / count + _Z**2 / (4 * count**2))
    # At the ends, rounding could exclude the share itself.
    return min(share, max(0.0, middle - half)), max(share, min(1.0, middle + half))


def bootstrap(scores: Sequence[float]) -> tuple[float, float]:
    """Return the 2.5th and 97.5th percentile of the mean over resamples; deterministic for equal scores."""
    values, counts = np.unique(np.asarray(scores, dtype=np.float64), return_counts=True)
    # The number of times each value is drawn: the same distribution as drawing the samples one by one.
    drawn = np.random.default_rng(0).multinomial(len(scores), counts / len(scores), size=RESAMPLES)
    means = drawn @ values / len(scores)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def weighted_sum(parts: Sequence[tuple[float, Estimate]]) -> Estimate:
    """Return the sum of weight × mean over independent estimates; weights are not negative.

    Its interval is derived from theirs (Zou and Donner's method of variance estimates recovery): the distances from
    mean to low and to high are added in quadrature.
    """
    mean = math.fsum(weight * part.mean for weight, part in parts)
    # Each side separately: near 0 and 1 an interval is not symmetric.
    below = math.hypot(*(weight * (part.mean - part.low) for weight, part in parts))
    above = math.hypot(*(weight * (part.high - part.mean) for weight, part in parts))
    count = sum(part.count for _, part in parts)
    return Estimate(mean=mean, low=max(0.0, mean - below), high=min(1.0, mean + above), count=count, method="sum")
