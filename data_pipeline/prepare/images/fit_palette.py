"""Palettes: the colours that represent a sample of pixels best, by k-means.

Lloyd's steps from a k-means++ start (Arthur and Vassilvitskii, 2007). Equal pixels are one point with a weight. Sums
are over whole numbers in float64, which are exact in any order, and distances are added channel by channel without a
matrix product: so the palette depends on the pixels alone, not on threads or the machine.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longctx.errors import DataError
from longctx.images.image_format import MOST_COLOURS
from longctx.integer_hash import mix64

LEAST_COLOURS = 2
_STEPS = 24
"""Maximum steps; the error hardly falls after the first dozen."""
_DISTANCES = 1 << 20
"""Distances computed together: 8 MiB in float64."""


class Palette(NamedTuple):
    """Colours, and how well they represent the sample."""

    colours: np.ndarray
    """Values 0 … 255, float64 [colours, C], in ascending order."""
    error: float
    """Mean squared difference between a sampled value and its colour's, in units of 1/255."""


def check_colours(count: int) -> None:
    """Raise DataError for a palette size that no format can have."""
    if not LEAST_COLOURS <= count <= MOST_COLOURS:
        raise DataError(f"--palette {count} must be from {LEAST_COLOURS} to {MOST_COLOURS}. Try --palette 512.")


def fit_palette(pixels: np.ndarray, count: int) -> Palette:
    """Return ``count`` colours for pixels, uint8 [N, C]; raise DataError if they have fewer distinct colours."""
    check_colours(count)
    points, weights = np.unique(pixels, axis=0, return_counts=True)
    if len(points) < count:
        raise DataError(
            f"--palette {count} needs as many distinct colours, but the sample of {len(pixels):,} pixels has "
            f"{len(points)}. Try --palette {len(points)}."
        )
    colours = _first_colours(points, weights, count)
    nearest, _ = _nearest(points, colours)
    for _ in range(_STEPS):
        colours = _means(points, weights, nearest, colours)
        before = nearest
        nearest, _ = _nearest(points, colours)
        if np.array_equal(nearest, before):
            break
    # Sorted, so that ids of similar colours are close to each other.
    colours = colours[np.lexsort(colours.T[::-1])]
    _, distances = _nearest(points, colours)
    return Palette(colours, float((distances * weights).sum() / (weights.sum() * pixels.shape[1])))


def _first_colours(points: np.ndarray, weights: np.ndarray, count: int) -> np.ndarray:
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


def _nearest(points: np.ndarray, colours: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return each point's nearest colour, int64 [N], and its squared distance, float64 [N]."""
    # Values are bytes, so squared differences come from a table [C, 256, colours].
    tables = (np.arange(256.0)[None, :, None] - colours.T[:, None, :]) ** 2
    nearest, squared = np.empty(len(points), np.int64), np.empty(len(points))
    step = max(1, _DISTANCES // len(colours))
    for start in range(0, len(points), step):
        part = points[start : start + step]
        distances = tables[0, part[:, 0]]
        for channel in range(1, part.shape[1]):
            distances = distances + tables[channel, part[:, channel]]
        found = distances.argmin(axis=1)
        nearest[start : start + step] = found
        squared[start : start + step] = distances[np.arange(len(part)), found]
    return nearest, squared


def _means(points: np.ndarray, weights: np.ndarray, nearest: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return the mean point of each colour; a colour without points keeps its place."""
    counts = np.bincount(nearest, weights, minlength=len(colours))
    means = colours.copy()
    used = counts > 0
    for channel in range(points.shape[1]):
        sums = np.bincount(nearest, weights * points[:, channel].astype(np.float64), minlength=len(colours))
        means[used, channel] = sums[used] / counts[used]
    return means
