"""Shuffled orders for documents and rows, in our own integer arithmetic: no library's generator can change them."""

from __future__ import annotations

import numpy as np

from longctx.integer_hash import mix64, mix64_array


def key64(*parts: int) -> int:
    """Return a 64-bit hash that depends on every integer in ``parts`` and on their order."""
    key = 0
    # Chained mixing rather than a sum or xor: (1, 2) and (2, 1) give independent keys.
    for part in parts:
        key = mix64(key ^ part)
    return key


def shuffled(numbers: np.ndarray, *parts: int) -> np.ndarray:
    """Return the indices [n], int64, that sort distinct ``numbers`` by their hash with ``parts``."""
    # Sorting by a hash gives each number a key that does not depend on the other numbers, unlike Fisher-Yates, which
    # consumes a generator's state. Distinct 64-bit inputs have distinct hashes, so ties are impossible.
    keys = mix64_array(numbers.astype(np.uint64) ^ np.uint64(key64(*parts)))
    return np.argsort(keys, kind="stable")


def falls_below(value: int, fraction: float, *parts: int) -> bool:
    """Return True for a ``fraction`` of all values, and always for the same values given the same ``parts``."""
    # Compare integers, so that the fraction is rounded once and not each value.
    return key64(value, *parts) < int(fraction * 2**64)


def fall_below(values: np.ndarray, fraction: float, *parts: int) -> np.ndarray:
    """Apply ``falls_below`` to every value and return bool [n]."""
    keys = values.astype(np.uint64)
    # Same steps as ``key64``, which starts from 0 and mixes in the value first.
    keys = mix64_array(keys)
    for part in parts:
        keys = mix64_array(keys ^ np.uint64(part))
    return keys < np.uint64(int(fraction * 2**64))


class Permutation:
    """Permutation over ``range(count)``, computed on demand and never stored; a pure function of its arguments."""

    _ROUNDS = 6
    """Four rounds are pseudorandom if the halves are wide; small counts have narrow halves."""

    def __init__(self, count: int, *parts: int) -> None:
        assert 0 <= count < 1 << 62, f"a permutation of {count}"
        bits = max(count - 1, 0).bit_length()
        # Feistel network (Luby and Rackoff, 1988) on bit_length(count - 1) bits: each round changes one half by a keyed
        # hash of the other half and can be undone, so the network is a bijection for any hash. Results outside
        # ``range(count)`` are permuted again until they fall inside (cycle walking; Black and Rogaway, "Ciphers with
        # arbitrary finite domains", 2002). This stays a bijection on ``range(count)`` and takes fewer than two passes
        # on average, because ``count`` exceeds half the domain.
        self._count = np.uint64(count)
        self._low_bits = np.uint64(bits - bits // 2)
        self._masks = np.uint64((1 << bits // 2) - 1), np.uint64((1 << bits - bits // 2) - 1)
        self._keys = [np.uint64(key64(*parts, number)) for number in range(self._ROUNDS)]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Return the numbers at these positions [n], int64; positions must be within ``range(count)``."""
        numbers = self._permute_bits(positions.astype(np.uint64))
        out_of_range = np.flatnonzero(numbers >= self._count)
        while len(out_of_range):
            numbers[out_of_range] = self._permute_bits(numbers[out_of_range])
            out_of_range = out_of_range[numbers[out_of_range] >= self._count]
        return numbers.astype(np.int64)

    def _permute_bits(self, numbers: np.ndarray) -> np.ndarray:
        """Apply the network to numbers in its power-of-two domain."""
        high_mask, low_mask = self._masks
        high, low = numbers >> self._low_bits, numbers & low_mask
        for number, key in enumerate(self._keys):
            # Changing only one half by a hash of the other keeps the round invertible: no two numbers collide.
            if number % 2:
                high = high ^ (mix64_array(low ^ key) & high_mask)
            else:
                low = low ^ (mix64_array(high ^ key) & low_mask)
        return high << self._low_bits | low
