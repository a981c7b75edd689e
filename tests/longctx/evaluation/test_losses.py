"""Losses of texts: sums and counts by position and distance, LongPPL's rule, intervals over texts."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from longctx.evaluation.losses import (
    LossRow,
    compute_pair_gaps,
    key_row,
    key_tokens,
    loss_by_bin,
    loss_over_texts,
    near_windows,
    text_row,
)


def test_a_text_is_counted_once_in_each_way():
    ids = [5, 7, 5, 7, 9, 5, 7, 1, 1]
    nll = np.arange(8, dtype=np.float32)
    row = text_row("ppl", 9, 0, "a", ids, nll)
    assert (row.nll, row.count, row.num_tokens) == (28.0, 8, 8)
    for bins in (row.by_position, row.by_distance):
        assert sum(part.nll for part in bins) == 28.0
        assert sum(part.count for part in bins) == 8
    assert [(part.start, part.stop, part.nll) for part in row.by_position] == [
        (0, 1, 0.0),
        (1, 2, 1.0),
        (2, 4, 5.0),
        (4, 8, 22.0),
    ]


def test_distance_is_to_the_same_pair_of_tokens():
    assert compute_pair_gaps([5, 7, 5, 7, 9, 5, 7]).tolist() == [0, 0, 2, 0, 0, 3]
    # Of three alike the second pair stood one before.
    assert compute_pair_gaps([1, 1, 1]).tolist() == [0, 1]
    assert compute_pair_gaps([1]).tolist() == []


def test_key_tokens_are_those_of_longppl():
    full = np.array([0.5, 0.5, 1.9, 2.0, 2.1])
    near = np.array([2.5, 2.6, 4.0, 9.0, 9.0])
    # A gain of exactly 2 and a loss of exactly 2 are not enough.
    assert key_tokens(full, near).tolist() == [False, True, True, False, False]
    row = key_row("longppl", 9, 0, "a", full, near)
    assert (row.nll, row.count, row.num_tokens) == (pytest.approx(2.4), 2, 5)


@pytest.mark.parametrize(("tokens", "windows"), [(6, [(0, 6)]), (9, [(0, 7), (3, 9)]), (10, [(0, 7), (3, 10)])])
def test_windows_compare_each_token_once(tokens, windows):
    found = near_windows(tokens, truncation=4, window=3)
    assert found == windows
    compared = [token for start, stop in found for token in range(start + 4, stop)]
    assert compared == list(range(4, tokens))


def test_loss_is_weighted_by_tokens():
    estimate = loss_over_texts([(10.0, 10), (90.0, 30)])
    assert estimate is not None
    assert estimate.loss == 2.5
    assert estimate.perplexity == math.exp(2.5)
    assert estimate.low is not None
    assert estimate.high is not None
    assert 1.0 <= estimate.low < 2.5 < estimate.high <= 3.0
    assert (estimate.num_tokens, estimate.num_texts) == (40, 2)


def test_one_text_has_no_interval_and_none_no_loss():
    one = loss_over_texts([(10.0, 10), (0.0, 0)])
    assert one is not None
    assert (one.loss, one.low, one.high, one.num_texts) == (1.0, None, None, 1)
    assert loss_over_texts([(0.0, 0)]) is None


def test_bins_add_up_over_texts():
    rows = [text_row("ppl", 5, n, "a", [1, 2, 3, 4, 5], np.full(4, n + 1.0)) for n in range(2)]
    found = loss_by_bin(rows, "by_position")
    assert [(start, stop) for start, stop, _ in found] == [(0, 1), (1, 2), (2, 4)]
    assert all(estimate.loss == 1.5 for _, _, estimate in found)
    assert [estimate.num_tokens for _, _, estimate in found] == [2, 2, 4]


def test_rows_survive_json():
    row = text_row("ppl", 9, 3, "ä", [5, 7, 5, 7], np.array([0.1, 0.2, 0.3], dtype=np.float32))
    assert LossRow.of_cells(json.loads(json.dumps(row.cells()))) == row
