"""64-bit integer mixing, so that orders and random draws do not depend on a library's generator or its version.

``mix64`` is one splitmix64 step: a bijection whose output bits look independent. Constants are from Steele, Lea and
Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
"""Increment for the generator's state: 2^64 divided by the golden ratio, made odd."""

_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = 0xFFFFFFFFFFFFFFFF


def mix64(x: int) -> int:
    """Return the splitmix64 image of a number's low 64 bits."""
    x = (x + GOLDEN) & _WORD
    x = ((x ^ (x >> 30)) * _FACTORS[0]) & _WORD
    x = ((x ^ (x >> 27)) * _FACTORS[1]) & _WORD
    return x ^ (x >> 31)


def mix64_array(values: np.ndarray) -> np.ndarray:
    """Return each value's splitmix64 image, uint64."""
    # uint64 array arithmetic wraps around, as the mixer requires
    x = values.astype(np.uint64) + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTORS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return x ^ (x >> np.uint64(31))
