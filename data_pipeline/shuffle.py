"""The order of documents and rows: a hash of 64-bit integers that depends on no library's random generator."""

from __future__ import annotations

import numpy as np

from longctx.mixing import mix64, mix64_array


def key64(*parts: int) -> int:
    """64 bits that depend on every integer of ``parts`` and on their order."""
    key = 0
    for part in parts:
        key = mix64(key ^ part)
    return key


def shuffled(count: int, *parts: int) -> np.ndarray:
    """A permutation of ``range(count)`` as int64: a pure function of ``count`` and ``parts``."""
    keys = mix64_array(np.arange(count, dtype=np.uint64) ^ np.uint64(key64(*parts)))
    return np.argsort(keys, kind="stable")


def falls_below(value: int, fraction: float, *parts: int) -> bool:
    """True for about ``fraction`` of all values, always the same ones for the same ``parts``."""
    # Compared as integers: the fraction is rounded once, not each value.
    return key64(value, *parts) < int(fraction * 2**64)
