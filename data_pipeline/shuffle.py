"""Random order of documents and rows, by our own integer arithmetic: independent of any library's random generator."""

from __future__ import annotations

import numpy as np

from longctx.mixing import mix64, mix64_array


def key64(*parts: int) -> int:
    """Return 64 bits that depend on every integer of ``parts`` and on their order."""
    key = 0
    for part in parts:
        key = mix64(key ^ part)
    return key


def shuffled(numbers: np.ndarray, *parts: int) -> np.ndarray:
    """Return the indices [n], int64, that sort distinct ``numbers`` by their hashes with ``parts``."""
    keys = mix64_array(numbers.astype(np.uint64) ^ np.uint64(key64(*parts)))
    return np.argsort(keys, kind="stable")


def falls_below(value: int, fraction: float, *parts: int) -> bool:
    """Return True for about ``fraction`` of all values, always the same ones for the same ``parts``."""
    # Compared as integers: the fraction is rounded once, not each value.
    return key64(value, *parts) < int(fraction * 2**64)


def fall_below(values: np.ndarray, fraction: float, *parts: int) -> np.ndarray:
    """Return ``falls_below`` of every value, bool [n]."""
    keys = values.astype(np.uint64)
    # The same steps as in ``key64``, which begins with 0 and the value itself.
    keys = mix64_array(keys)
    for part in parts:
        keys = mix64_array(keys ^ np.uint64(part))
    return keys < np.uint64(int(fraction * 2**64))


class Permutation:
    """A permutation of ``range(count)``, computed on the fly and not stored: a pure function of its arguments.

    A Feistel network (Luby and Rackoff 1988) permutes the numbers of as many bits as ``count`` needs. If the result is
    out of range, it is applied again until the result is in range (cycle walking; Black and Rogaway, "Ciphers with
    arbitrary finite domains", 2002): fewer than two times on average, because ``count`` is more than half of these
    numbers.
    """

    _ROUNDS = 6
    """Four are pseudorandom for wide halves; small counts have narrow ones."""

    def __init__(self, count: int, *parts: int) -> None:
        assert 0 <= count < 1 << 62, f"a permutation of {count}"
        bits = max(count - 1, 0).bit_length()
        self._count = np.uint64(count)
        self._low_bits = np.uint64(bits - bits // 2)
        self._masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
        self._keys = [np.uint64(key64(*parts, number)) for number in range(self._ROUNDS)]

    def at(self, places: np.ndarray) -> np.ndarray:
        """Return the numbers at these places [n], int64; places are within ``range(count)``."""
        numbers = self._permute_bits(places.astype(np.uint64))
        outside = np.flatnonzero(numbers >= self._count)
        while len(outside):
            numbers[outside] = self._permute_bits(numbers[outside])
            outside = outside[numbers[outside] >= self._count]
        return numbers.astype(np.int64)

    def _permute_bits(self, numbers: np.ndarray) -> np.ndarray:
        """Apply the network: a permutation of all numbers of so many bits."""
        high_mask, low_mask = self._masks
        high, low = numbers >> self._low_bits, numbers & low_mask
        for number, key in enumerate(self._keys):
            # Each round changes one part by a hash of the other, so it is invertible: no two numbers collide.
            if number % 2:
                high = high ^ (mix64_array(low ^ key) & high_mask)
            else:
                low = low ^ (mix64_array(high ^ key) & low_mask)
        return high << self._low_bits | low
