"""Our own 64-bit integer mixing, so that an order never depends on a library's random generator or its version."""

from __future__ import annotations

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def mix64(values: np.ndarray) -> np.ndarray:
    """Each uint64 replaced by its splitmix64 image: a bijection whose output bits look independent.

    Constants are those of Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (2014).
    """
    x = values.astype(np.uint64) + _GOLDEN  # array arithmetic on uint64 wraps, as the mixer wants
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def key64(*parts: int) -> np.ndarray:
    """A one-element uint64 array that depends on every integer of ``parts`` and on their order."""
    key = np.zeros(1, dtype=np.uint64)
    for part in parts:
        key = mix64(key ^ np.array([part & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64))
    return key


def shuffled(count: int, *parts: int) -> np.ndarray:
    """A permutation of ``range(count)`` as int64: a pure function of ``count`` and ``parts``."""
    keys = mix64(np.arange(count, dtype=np.uint64) ^ key64(*parts))
    return np.argsort(keys, kind="stable")


def falls_below(value: int, fraction: float, *parts: int) -> bool:
    """True for about ``fraction`` of all values, always the same ones for the same ``parts``."""
    mixed = int(key64(value, *parts)[0])
    return mixed < int(fraction * 2**64)
