"""Rows of a step on ranks by their work: each row once, ranks even, micro-batches of like rows, the same everywhere."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.rows.balance import balanced
from data_pipeline.rows.micro_batches import MicroBatches


def loads_of(costs: list[int], dealt: MicroBatches) -> np.ndarray:
    """Work by data rank and micro-batch."""
    places = balanced(costs, dealt)
    return np.array(
        [
            [sum(costs[places[place]] for place in dealt.rows(number, rank)) for number in range(len(dealt))]
            for rank in range(dealt.data_degree)
        ]
    )


@settings(max_examples=100, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 9), rows=st.integers(1, 17), most=st.integers(1, 5))
def test_every_row_once_and_no_worse_than_a_rank_that_takes_the_costliest_each_time(data, ranks, rows, most):
    dealt = MicroBatches.deal(rows * ranks, most_rows=most, data_degree=ranks)
    costs = data.draw(st.lists(st.integers(0, 10**12), min_size=rows * ranks, max_size=rows * ranks))
    places = balanced(costs, dealt)
    assert sorted(places) == list(range(rows * ranks))
    loads = loads_of(costs, dealt)
    # Ranks differ by no more than the costliest row.
    sums = loads.sum(1)
    assert sums.max() - sums.min() <= max(costs) * dealt.largest
    # The costliest rows come first.
    first = 0
    for size in dealt.sizes[:-1] if ranks > 1 else ():
        behind = first + size * ranks
        assert min(costs[row] for row in places[first:behind]) >= max(costs[row] for row in places[behind:])
        first = behind


def test_one_rank_takes_rows_in_their_order():
    dealt = MicroBatches.deal(7, most_rows=2)
    assert balanced([3, 1, 4, 1, 5, 9, 2], dealt) == list(range(7))


def test_rows_of_like_work_share_a_micro_batch_and_the_costliest_goes_to_whoever_has_least():
    dealt = MicroBatches.deal(4, most_rows=1, data_degree=2)
    # Rank 0 takes 9 and then 1; rank 1 takes 8 and then 5.
    assert [[9, 5, 1, 8][row] for row in balanced([9, 5, 1, 8], dealt)] == [9, 8, 1, 5]


def test_equal_rows_keep_their_order():
    dealt = MicroBatches.deal(6, most_rows=3, data_degree=2)
    assert balanced([7] * 6, dealt) == [0, 2, 4, 1, 3, 5]


@pytest.mark.parametrize("seed", range(3))
def test_long_documents_leave_ranks_within_a_twentieth(seed):
    """Eight micro-batches on each of eight ranks, rows of log-normal documents: 1.3 to 1.6 in their order."""
    random = np.random.default_rng(seed)
    costs = []
    for _ in range(64):
        lengths, left = [], 1 << 18
        while left:
            length = min(left, int(np.exp(random.normal(8, 2))) + 1)
            lengths.append(length)
            left -= length
        costs.append(sum(n * (61_000 + n) for n in lengths))
    dealt = MicroBatches.deal(64, most_rows=1, data_degree=8)
    sums = loads_of(costs, dealt).sum(1)
    assert sums.max() / sums.mean() <= 1.05
