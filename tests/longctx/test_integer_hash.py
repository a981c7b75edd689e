"""splitmix64: the published outputs, by numbers and by arrays."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from longctx.integer_hash import GOLDEN, mix64, mix64_array

FIRST_OUTPUTS = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
"""Of the generator that starts at 0."""


def test_the_published_outputs():
    states = [(GOLDEN * n) % 2**64 for n in range(3)]
    assert [mix64(state) for state in states] == FIRST_OUTPUTS
    assert mix64_array(np.array(states, dtype=np.uint64)).tolist() == FIRST_OUTPUTS


def test_of_seeds_in_a_row():
    expected = [0xE220A8397B1DCDAF, 0x910A2DEC89025CC1, 0x975835DE1C9756CE]
    assert mix64_array(np.arange(3)).tolist() == expected == [mix64(n) for n in range(3)]


@given(st.integers(-(2**70), 2**70))
def test_both_forms_agree_on_the_64_bits_that_count(x):
    assert mix64(x) == mix64(x % 2**64) == int(mix64_array(np.array([x % 2**64], dtype=np.uint64))[0])
