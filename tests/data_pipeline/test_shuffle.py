"""The order of documents: a permutation by arithmetic, and an order by hashes."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.shuffle import Permutation, shuffled

SIZES = [0, 1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 97, 1023, 1024, 1025, 7919, (1 << 16) - 1, 1 << 16, (1 << 16) + 1]
"""Primes, powers of two, and their neighbours."""


@given(st.integers(0, 3000) | st.sampled_from(SIZES), st.integers(0, 2**64), st.integers(0, 9))
def test_every_number_stands_at_one_place_whatever_the_size(count: int, seed: int, epoch: int):
    assert sorted(Permutation(count, seed, epoch).at(np.arange(count)).tolist()) == list(range(count))


@given(st.integers(1, 2**50), st.lists(st.integers(0, 2**50), min_size=1, max_size=20))
def test_a_place_has_one_number_whatever_else_is_asked_for(count: int, places: list[int]):
    within = np.array(places) % count
    permutation = Permutation(count, 3)
    together = permutation.at(within)
    assert all(0 <= number < count for number in together)
    assert together.tolist() == [int(permutation.at(np.array([place]))[0]) for place in within]
    assert together.dtype == np.int64
    # Distinct places have distinct numbers, also where the range is too large to look at all of it.
    assert len(set(together.tolist())) == len(set(within.tolist()))


def test_the_permutation_never_changes():
    """A loader state refers to rows of this order."""
    assert Permutation(10, 1, 2).at(np.arange(10)).tolist() == [9, 5, 4, 6, 1, 8, 0, 3, 7, 2]
    assert Permutation(10**12 + 39, 7, 0, 0).at(np.arange(4) * 10**11).tolist() == [
        328006259783,
        527948822453,
        817026172416,
        955027036762,
    ]


def feistel(place: int, count: int, keys: list[int]) -> int:
    """The same network one number at a time, written from its definition: halves, rounds, cycle walking."""
    from longctx.integer_hash import mix64

    bits = (count - 1).bit_length()
    low_bits = (bits + 1) // 2
    high_bits = bits - low_bits
    while True:
        high, low = place // 2**low_bits, place % 2**low_bits
        for number, key in enumerate(keys):
            if number % 2 == 0:
                low = (low ^ mix64(high ^ key)) % 2**low_bits
            else:
                high = (high ^ mix64(low ^ key)) % 2**high_bits
        place = high * 2**low_bits + low
        if place < count:
            return place


@given(st.integers(2, 10**6), st.integers(0, 10**6), st.integers(0, 2**64))
def test_it_is_a_feistel_network_with_cycle_walking(count: int, place: int, seed: int):
    from data_pipeline.shuffle import key64

    keys = [key64(seed, 4, number) for number in range(6)]
    assert int(Permutation(count, seed, 4).at(np.array([place % count]))[0]) == feistel(place % count, count, keys)


def test_the_order_by_hashes_never_changes():
    """A loader state refers to rows of this order."""
    numbers = np.arange(8)
    assert shuffled(numbers, 1, 2).tolist() == [7, 5, 6, 1, 4, 3, 0, 2]
    assert shuffled(numbers, 1, 2).tolist() != shuffled(numbers, 2, 1).tolist()


def test_a_number_has_one_hash_whatever_stands_beside_it():
    order = [7, 5, 6, 1, 4, 3, 0, 2]
    part = np.array([1, 3, 6])
    assert part[shuffled(part, 1, 2)].tolist() == [number for number in order if number in part]
