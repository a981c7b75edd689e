"""The search for the amount of filler: right for any numbers of tokens, and sparing with them."""

from __future__ import annotations

from itertools import accumulate

from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.evaluation.fitted import largest_fitting


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    steps=st.lists(st.integers(0, 9), min_size=2, max_size=400),
    smallest=st.integers(0, 3),
    extra=st.integers(0, 2500),
    bounded=st.booleans(),
)
def test_one_unit_more_would_not_fit(steps: list[int], smallest: int, extra: int, bounded: bool):
    sums = list(accumulate(steps, initial=5))

    def tokens_of(units: int) -> int:
        within = min(units, len(steps))
        return sums[within] + 3 * (units - within)

    most = None
    if bounded:
        most = smallest + 150
    budget = tokens_of(smallest) + extra
    found = largest_fitting(tokens_of, smallest=smallest, most=most, budget=budget)
    assert tokens_of(found) <= budget
    assert found == most or tokens_of(found + 1) > budget


def test_a_million_units_take_few_probes():
    probes: list[int] = []

    def tokens_of(units: int) -> int:
        probes.append(units)
        return 40 + units * 13 // 10 + (units // 97) % 5

    found = largest_fitting(tokens_of, smallest=16, most=None, budget=1_000_000)
    assert tokens_of(found) <= 1_000_000
    assert len(probes) <= 16
    assert sum(probes) < 16 * found


@settings(max_examples=50, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10**6), budget=st.integers(60, 5000))
def test_uneven_tokens_still_fit(seed: int, budget: int):
    """More filler may take fewer tokens: what is found fits all the same."""

    def tokens_of(units: int) -> int:
        return 20 + 2 * units + (units * 2654435761 + seed) % 23

    assert tokens_of(largest_fitting(tokens_of, smallest=1, most=None, budget=budget)) <= budget
