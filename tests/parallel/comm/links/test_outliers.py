"""The rule by which a link is called slow."""

from __future__ import annotations

from itertools import combinations

import pytest

from parallel.comm.links.outliers import Outlier, find_outliers
from parallel.comm.links.rates import LinkRate

GOOD, SLOW = 1e9, 1e8


def rates(world: int, slow=lambda pair: False, late=lambda pair: False) -> list[LinkRate]:
    """Every link of a world, with values that scatter by a tenth."""
    found = []
    for number, pair in enumerate(combinations(range(world), 2)):
        scatter = 1 + 0.1 * (number % 3)
        bandwidth = SLOW if slow(pair) else GOOD
        latency = 2e-3 if late(pair) else 5e-5
        found.append(LinkRate(*pair, bytes_per_second=bandwidth * scatter, latency_seconds=latency * scatter))
    return found


@pytest.mark.parametrize("world", [0, 1, 2, 3, 4, 8, 9])
def test_links_that_are_alike(world):
    assert find_outliers(rates(world)) == []


@pytest.mark.parametrize("world", [3, 4, 5, 8])
@pytest.mark.parametrize("rank", [0, 2])
def test_a_slow_rank_is_named_once(world, rank):
    (outlier,) = find_outliers(rates(world, slow=lambda pair: rank in pair))
    assert (outlier.quantity, outlier.ranks) == ("bandwidth", (rank,))
    # A tenth of the others, but for the scatter of both.
    assert 10 / 1.2 <= outlier.ratio <= 12


@pytest.mark.parametrize("world", [3, 4, 8])
def test_one_slow_link_is_named_by_both_ends(world):
    (outlier,) = find_outliers(rates(world, slow=lambda pair: pair == (1, 2)))
    assert (outlier.quantity, outlier.ranks) == ("bandwidth", (1, 2))


def test_half_of_the_ranks_may_be_slow():
    found = find_outliers(rates(4, slow=lambda pair: pair != (0, 1)))
    assert sorted(outlier.ranks for outlier in found) == [(2,), (3,)]


def test_two_ranks_have_nothing_to_compare_with():
    assert find_outliers(rates(2, slow=lambda pair: True, late=lambda pair: True)) == []


@pytest.mark.parametrize("world", [3, 4, 8])
def test_a_high_latency_is_named_too(world):
    (outlier,) = find_outliers(rates(world, late=lambda pair: 0 in pair))
    assert (outlier.quantity, outlier.ranks) == ("latency", (0,))
    assert outlier.ratio == pytest.approx(40, rel=0.3)


def test_microseconds_scatter():
    # Five times as long as on a link within a machine, and yet nobody's trouble.
    found = [LinkRate(0, 1, GOOD, 1e-5), LinkRate(0, 2, GOOD, 5e-5), LinkRate(1, 2, GOOD, 1e-5)]
    assert find_outliers(found) == []


def test_the_worst_stands_first():
    def bandwidth(pair: tuple[int, int]) -> float:
        return {(0, 1): 1e7, (2, 3): 2e8}.get(pair, 1e9)

    found = find_outliers([LinkRate(*pair, bandwidth(pair), 1e-5) for pair in combinations(range(6), 2)])
    assert [(outlier.ranks, round(outlier.ratio)) for outlier in found] == [((0, 1), 100), ((2, 3), 5)]


def test_a_ratio_is_how_much_worse():
    assert Outlier("bandwidth", (0,), 25.0, 100.0).ratio == 4
    assert Outlier("latency", (0,), 100.0, 25.0).ratio == 4
