"""Rows of a step dealt out over micro-batches and data ranks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.rows.micro_batches import MicroBatches


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 9))
def test_every_row_once_in_order_and_as_equal_as_they_can_be(rows_of_rank, most_rows, data_degree):
    rows_per_step = rows_of_rank * data_degree
    dealt = MicroBatches.deal(rows_per_step, most_rows=most_rows, data_degree=data_degree)
    rows = [
        row for number in range(len(dealt)) for data_rank in range(data_degree) for row in dealt.rows(number, data_rank)
    ]
    assert rows == list(range(rows_per_step))
    assert max(dealt.sizes) - min(dealt.sizes) <= 1
    assert min(dealt.sizes) > 0
    assert dealt.largest == max(dealt.sizes) <= most_rows
    assert (len(dealt) - 1) * most_rows < rows_of_rank, "no more of them than needed"
    for number, size in enumerate(dealt.sizes):
        assert {len(dealt.rows(number, data_rank)) for data_rank in range(data_degree)} == {size}


@given(st.integers(1, 200), st.integers(1, 40), st.integers(1, 9))
def test_to_deal_by_the_largest_gives_the_same(rows_of_rank, most_rows, data_degree):
    """A run's settled config has the rows of its largest micro-batch and nothing else."""
    dealt = MicroBatches.deal(rows_of_rank * data_degree, most_rows=most_rows, data_degree=data_degree)
    again = MicroBatches.deal(rows_of_rank * data_degree, most_rows=dealt.largest, data_degree=data_degree)
    assert again == dealt


@pytest.mark.parametrize(
    ("rows", "most_rows", "data_degree", "sizes"),
    [(16, 3, 1, (3, 3, 3, 3, 2, 2)), (16, 3, 2, (3, 3, 2)), (4, 9, 1, (4,)), (8, 2, 2, (2, 2)), (5, 1, 5, (1,))],
)
def test_sizes(rows, most_rows, data_degree, sizes):
    assert MicroBatches.deal(rows, most_rows=most_rows, data_degree=data_degree).sizes == sizes


def test_ranks_that_do_not_divide_the_rows_are_a_fault():
    with pytest.raises(AssertionError, match="5 rows over 2"):
        MicroBatches.deal(5, most_rows=2, data_degree=2)
