from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from data_pipeline.rows.epoch_blocks import PackReport
from data_pipeline.rows.pack import Packing, Parts, RowPlan, plan_parts
from longctx.errors import ConfigError
from tests.data_pipeline.lengths import plan_rows

LENGTHS = st.lists(st.integers(1, 70), max_size=60)
SEQ_LENS = st.integers(1, 40)


def rows(plan: RowPlan) -> list[list[tuple[int, int, int]]]:
    return [list(plan.row(index)) for index in range(plan.num_rows)]


@given(LENGTHS, SEQ_LENS, st.integers(0, 2**64), st.integers(0, 3), st.booleans(), st.integers(1, 5))
def test_every_token_stands_in_exactly_one_place(lengths, seq_len, seed, epoch, shuffle, open_rows):
    plan = plan_rows(np.array(lengths, int), seq_len, seed=seed, epoch=epoch, shuffle=shuffle, open_rows=open_rows)
    tokens = [(d, t) for row in rows(plan) for d, start, stop in row for t in range(start, stop)]
    assert sorted(tokens) == [(d, t) for d, length in enumerate(lengths) for t in range(length)]


@given(LENGTHS, SEQ_LENS, st.integers(0, 5))
def test_rows_hold_something_and_never_too_much(lengths, seq_len, seed):
    plan = plan_rows(np.array(lengths, int), seq_len, seed=seed)
    sizes = [sum(stop - start for _, start, stop in row) for row in rows(plan)]
    assert all(0 < size <= seq_len for size in sizes)
    assert plan.row_tokens.tolist() == sizes


@given(LENGTHS, SEQ_LENS, st.data())
def test_rows_at_once_are_the_rows(lengths, seq_len, data):
    plan = plan_rows(np.array(lengths, int), seq_len)
    first = data.draw(st.integers(0, plan.num_rows))
    stop = data.draw(st.integers(first, plan.num_rows))
    found, tokens = plan.rows(first, stop)
    assert list(map(list, found)) == rows(plan)[first:stop]
    assert tokens == plan.row_tokens[first:stop].sum()


@given(LENGTHS, SEQ_LENS, st.integers(0, 5))
def test_only_documents_longer_than_a_row_are_cut_and_only_at_its_multiples(lengths, seq_len, seed):
    plan = plan_rows(np.array(lengths, int), seq_len, seed=seed)
    pieces = [piece for row in rows(plan) for piece in row]
    assert all(start % seq_len == 0 and stop == min(start + seq_len, lengths[d]) for d, start, stop in pieces)
    report = PackReport.of([plan], seq_len)
    assert report.documents_cut == sum(length > seq_len for length in lengths)
    assert report.truncated_tokens == 0
    assert report.tokens + report.padding_tokens == report.rows * seq_len


def test_without_shuffle_rows_follow_the_documents():
    plan = plan_rows(np.array([25, 4, 7, 3]), 10, shuffle=False)
    assert rows(plan) == [[(0, 0, 10)], [(0, 10, 20)], [(0, 20, 25), (1, 0, 4)], [(2, 0, 7), (3, 0, 3)]]


def test_best_fit_takes_the_row_with_the_least_room():
    plan = plan_rows(np.array([6, 8, 2, 4]), 10, shuffle=False)
    assert rows(plan) == [[(0, 0, 6), (3, 0, 4)], [(1, 0, 8), (2, 0, 2)]]


def test_the_fullest_row_closes_when_too_many_are_open():
    plan = plan_rows(np.array([7, 8, 9, 2, 3]), 10, shuffle=False, open_rows=1)  # 2 would fit the closed row of 8
    assert rows(plan) == [[(0, 0, 7), (3, 0, 2)], [(1, 0, 8)], [(2, 0, 9)], [(4, 0, 3)]]


def test_padding_stays_below_one_percent_on_many_short_documents():
    lengths = np.exp(np.random.default_rng(0).normal(6, 1.2, 20_000)).astype(int) + 1
    assert PackReport.of([plan_rows(lengths, 4096)], 4096).padding_share < 0.002


class TestPacking:
    """Other ways than best fit."""

    @given(lengths=LENGTHS, seq_len=st.integers(1, 40), seed=st.integers(0, 99), shuffle=st.booleans())
    def test_concatenation_has_every_token_once_and_full_rows(self, lengths, seq_len: int, seed: int, shuffle: bool):
        parts = Parts.whole(np.arange(len(lengths)), np.array(lengths, np.int64))
        plan = plan_parts(parts, seq_len, packing=Packing("concatenate"), seed=seed, shuffle=shuffle)
        tokens = sorted((d, t) for row in rows(plan) for d, start, stop in row for t in range(start, stop))
        assert tokens == [(d, t) for d, length in enumerate(lengths) for t in range(length)]
        assert plan.num_rows == -(-sum(lengths) // seq_len)
        assert sorted(plan.row_tokens.tolist(), reverse=True)[:-1] == [seq_len] * max(plan.num_rows - 1, 0)
        cut = {d for row in rows(plan) for d, start, stop in row if stop - start < lengths[d]}
        assert plan.num_cut == len(cut)

    def test_concatenation_cuts_where_a_row_ends(self):
        parts = Parts.whole(np.arange(3), np.array([6, 7, 12]))
        plan = plan_parts(parts, 10, packing=Packing("concatenate"), shuffle=False)
        assert rows(plan) == [[(0, 0, 6), (1, 0, 4)], [(1, 4, 7), (2, 0, 7)], [(2, 7, 12)]]

    @given(
        lengths=LENGTHS,
        seq_len=st.integers(1, 40),
        least=st.integers(1, 50),
        kind=st.sampled_from(["best_fit", "one_document"]),
    )
    def test_short_rests_alone_are_left_out(self, lengths, seq_len: int, least: int, kind):
        parts = Parts.whole(np.arange(len(lengths)), np.array(lengths, np.int64))
        plan = plan_parts(parts, seq_len, packing=Packing(kind, least))
        wanted = []
        for document, length in enumerate(lengths):
            full, rest = divmod(length, seq_len)
            if full and rest < min(least, seq_len):
                length = full * seq_len
            wanted += [(document, token) for token in range(length)]
        assert sorted((d, t) for row in rows(plan) for d, start, stop in row for t in range(start, stop)) == wanted
        report = PackReport.of([plan], seq_len)
        assert report.truncated_tokens == sum(lengths) - len(wanted)
        assert report.documents_cut == sum(length > seq_len for length in lengths)
        if kind == "one_document":
            assert all(len(row) == 1 for row in rows(plan))

    def test_what_does_not_go_together_is_refused(self):
        with pytest.raises(ConfigError, match=r"min_rest_tokens=0 must be at least 1 \(1 keeps every rest\)"):
            Packing(min_rest_tokens=0)
        with pytest.raises(ConfigError, match="cuts documents at every row end"):
            Packing("concatenate", 5)
        with pytest.raises(ConfigError, match="must be one of best_fit, concatenate, one_document"):
            Packing("first_fit")  # type: ignore[arg-type]
