"""Which pairs are measured when: each once, none disturbed by another."""

from __future__ import annotations

from itertools import combinations

import pytest

from parallel.comm.links.rounds import pair_of, rounds_of, rounds_of_hosts


def pairs(rounds) -> list[tuple[int, int]]:
    return [pair for each in rounds for pair in each]


def disjoint(rounds) -> bool:
    return all(len({rank for pair in each for rank in pair}) == 2 * len(each) for each in rounds)


@pytest.mark.parametrize("count", range(18))
def test_each_pair_once_and_no_rank_twice_at_a_time(count):
    ranks = [10 + 3 * n for n in range(count)]
    rounds = rounds_of(ranks, most_rounds=100)
    assert sorted(pairs(rounds)) == list(combinations(ranks, 2))
    assert disjoint(rounds)
    # As few as there can be: n - 1 for an even number, n for an odd one.
    fewest = count - 1 + count % 2
    if count < 2:
        fewest = 0
    assert len(rounds) == fewest


@pytest.mark.parametrize("count", [31, 32, 1001])
def test_many_ranks_are_a_sample_in_which_everyone_is(count):
    rounds = rounds_of(range(count), most_rounds=7)
    assert len(rounds) == 7
    assert disjoint(rounds)
    assert len(set(pairs(rounds))) == len(pairs(rounds)) == 7 * (count // 2)
    all_rounds = rounds_of(range(count), most_rounds=count)
    assert rounds == [all_rounds[index * len(all_rounds) // 7] for index in range(7)], "evenly spaced"
    met = [sum(rank in pair for pair in pairs(rounds)) for rank in range(count)]
    assert min(met) >= 7 - count % 2


def test_pairs_within_hosts_and_the_first_ranks_between_them():
    rounds = rounds_of_hosts(["a", "b", "a", "a", "c"])
    assert sorted(pairs(rounds)) == [(0, 1), (0, 2), (0, 3), (0, 4), (1, 4), (2, 3)]
    assert disjoint(rounds)


def test_hosts_do_not_wait_for_one_another():
    # Two hosts of four ranks: 3 rounds within both at once, and one between them.
    rounds = rounds_of_hosts([0, 0, 0, 0, 1, 1, 1, 1])
    assert [len(each) for each in rounds] == [4, 4, 4, 1]
    assert rounds[-1] == ((0, 4),)


@pytest.mark.parametrize("hosts", [[], ["a"], ["a", "b"], ["a", "a"]])
def test_few_ranks(hosts):
    assert pairs(rounds_of_hosts(hosts)) == [(0, 1)][: len(hosts) // 2]


def test_who_is_in_a_round():
    assert pair_of(3, ((0, 1), (2, 3))) == (2, 3)
    assert pair_of(4, ((0, 1), (2, 3))) is None
