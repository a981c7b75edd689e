"""The table of slices: nothing lost between it and its rows, moved as its rows move, remembered while it lives."""

from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

from longctx.kernels.attention.slices import AttentionSlice, once_per_table, shift_table, slice_table, table_slices

rows = st.integers(0, 2**40)
bounds = st.none() | st.integers(-(2**40), 2**40)
slices = st.builds(
    AttentionSlice, rows, rows, rows, rows, bounds, bounds, st.integers(1, 64), bounds.map(lambda x: x or 0)
)


@given(st.lists(slices, max_size=5).map(tuple))
def test_a_table_holds_all_of_its_slices(listed):
    table = slice_table(listed)
    assert (table.shape, table.dtype) == ((len(listed), 8), torch.int64)
    assert table_slices(table) == listed
    assert slice_table(list(listed)) is table


@given(st.lists(slices, max_size=5).map(tuple), st.integers(-99, 99), st.integers(-99, 99))
def test_a_table_is_shifted_like_its_slices(listed, queries, keys):
    moved = shift_table(slice_table(listed), queries=queries, keys=keys)
    assert table_slices(moved) == tuple(one.shifted(queries=queries, keys=keys) for one in listed)
    assert table_slices(slice_table(listed)) == listed


def test_what_follows_from_a_table_is_computed_once_and_freed_with_it():
    class Result:
        def __init__(self):
            freed.append(False)

        def __del__(self):
            freed[0] = True

    freed: list[bool] = []

    @once_per_table
    def compute(table, kind, *, wide=False):
        return Result()

    table = torch.tensor([[0, 2, 0, 2, 0, 0, 1, 0]])
    first = compute(table, "a")
    assert compute(table, "a") is first
    assert len({first, compute(table, "b"), compute(table, "a", wide=True), compute(table.clone(), "a")}) == 4
    del first, table
    gc.collect()
    assert freed[0]
