"""64-bit integer mixing, so that no order or draw depends on a library's random generator or its version.

``mix64`` is one step of splitmix64: a bijection with output bits that look independent. Constants are those of Steele,
Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
"""

from __future__ import annotations

import numpy as np

GOLDEN = 0x9E3779B97F4A7C15
"""What the generator's state advances by: 2^64 divided by the golden ratio, made odd."""

_FACTORS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_WORD = 0xFFFFFFFFFFFFFFFF


def mix64(x: int) -> int:
    """Return the splitmix64 image of the low 64 bits of a number."""
    x = (x + GOLDEN) & _WORD
    x = ((x ^ (x >> 30)) * _FACTORS[0]) & _WORD
    x = ((x ^ (x >> 27)) * _FACTORS[1]) & _WORD
    return x ^ (x >> 31)


def mix64_array(values: np.ndarray) -> np.ndarray:
    """Return the splitmix64 image of each value, uint64."""
    # Arithmetic on uint64 arrays wraps, as the mixer requires.
    x = values.astype(np.uint64) + np.uint64(GOLDEN)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(_FACTORS[0])
    x = (x ^ (x >> np.uint64(27))) * np.uint64(_FACTORS[1])
    return x ^ (x >> np.uint64(31))
