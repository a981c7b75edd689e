"""Palettes: the colors that represent a sample of pixels best, by k-means.

Lloyd's steps from a k-means++ start (Arthur and Vassilvitskii, 2007). Equal pixels are one point with a weight. Sums
are over whole numbers in float64, which are exact in any order, and distances are added channel by channel without a
matrix product: so the palette depends on the pixels alone, not on threads or the machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longctx.errors import DataError
from longctx.images.image_format import MOST_COLORS
from longctx.integer_hash import mix64

LEAST_COLORS = 2
_STEPS = 24
"""Maximum steps; the error hardly falls after the first dozen."""
_DISTANCES = 1 << 20
"""Distances computed together: 8 MiB in float64."""


class Palette(NamedTuple):
    """Colors, and how well they represent the sample."""

    colors: np.ndarray
    """Values 0 … 255, float64 [colors, C], in ascending order."""
    error: float
    """Mean squared difference between a sampled value and its color's, in units of 1/255."""


def check_colors(count: int) -> None:
    """Raise DataError for a palette size that no format can have."""
    if not LEAST_COLORS <= count <= MOST_COLORS:
        raise DataError(f"--palette {count} must be from {LEAST_COLORS} to {MOST_COLORS}. Try --palette 512.")


def fit_palette(pixels: np.ndarray, count: int) -> Palette:
    """Return ``count`` colors for pixels, uint8 [N, C]; raise DataError if they have fewer distinct colors."""
    check_colors(count)
    points, weights = np.unique(pixels, axis=0, return_counts=True)
    if len(points) < count:
        raise DataError(
            f"--palette {count} needs as many distinct colors, but the sample of {len(pixels):,} pixels has "
            f"{len(points)}. Try --palette {len(points)}."
        )
    colors = _first_colors(points, weights, count)
    nearest, _ = _nearest(points, colors)
    for _ in range(_STEPS):
        colors = _means(points, weights, nearest, colors)
        before = nearest
        nearest, _ = _nearest(points, colors)
        if np.array_equal(nearest, before):
            break
    # Sorted, so that ids of similar colors are close to each other.
    colors = colors[np.lexsort(colors.T[::-1])]
    _, distances = _nearest(points, colors)
    return Palette(colors, float((distances * weights).sum() / (weights.sum() * pixels.shape[1])))


def _first_colors(points: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
    """Choose distinct points, each with a probability proportional to its squared distance from those chosen before."""
    chosen = np.empty((count, points.shape[1]))
    distances = np.full(len(points), np.inf)
    mass = weights.astype(np.float64)
    for number in range(count):
        # Hashes instead of a generator: the choice must not depend on a library's version.
        share = (mix64(number) >> 11) / (1 << 53)
        totals = np.cumsum(mass)
        at = int(np.searchsorted(totals, share * totals[-1], side="right"))
        # A point without mass is chosen already; rounding at the end must not select it again.
        at = min(at, int(np.flatnonzero(mass)[-1]))
        chosen[number] = points[at]
        distances = np.minimum(distances, ((points - chosen[number]) ** 2).sum(axis=1))
        mass = distances * weights
    return chosen


def _nearest(points: np.ndarray, colors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each point's nearest color, int64 [N], and its squared distance, float64 [N]."""
    # Values are bytes, so squared differences come from a table [C, 256, colors].
    tables = (np.arange(256.0)[None, :, None] - colors.T[:, None, :]) ** 2
    nearest, squared = np.empty(len(points), np.int64), np.empty(len(points))
    step = max(1, _DISTANCES // len(colors))
    for start in range(0, len(points), step):
        part = points[start : start + step]
        distances = tables[0, part[:, 0]]
        for channel in range(1, part.shape[1]):
            distances = distances + tables[channel, part[:, channel]]
        found = distances.argmin(axis=1)
        nearest[start : start + step] = found
        squared[start : start + step] = distances[np.arange(len(part)), found]
    return nearest, squared


def _means(points: np.ndarray, weights: np.ndarray, nearest: np.ndarray, colors: np.ndarray) -> np.ndarray:
    """Return the mean point of each color; a color without points keeps its place."""
    counts = np.bincount(nearest, weights, minlength=len(colors))
    means = colors.copy()
    used = counts > 0
    for channel in range(points.shape[1]):
        sums = np.bincount(nearest, weights * points[:, channel].astype(np.float64), minlength=len(colors))
        means[used, channel] = sums[used] / counts[used]
    return means
