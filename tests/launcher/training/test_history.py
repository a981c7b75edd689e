"""What is a spike, and what a checkpoint says of the steps before."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.training.history import LEAST, WINDOW, History
from longctx.errors import CheckpointError

FINITE = st.floats(-1e6, 1e6)


def after(values: list[float]) -> History:
    history = History()
    for value in values:
        history = history.taken(value, 1.0 + value)
    return history


NOISY = [3.0 + 0.01 * (-1) ** n for n in range(LEAST)]


@pytest.mark.parametrize(
    ("loss", "norm", "said"),
    [(3.05, 4.0, ""), (3.07, 4.0, "loss 3.07, 7.0 standard"), (3.0, 4.07, "gradient norm 4.07"), (0.0, 0.0, "")],
)
def test_a_spike_lies_far_above_the_steps_before(loss, norm, said):
    found = after(NOISY).spike(loss, norm, 6.0)
    assert found.startswith(said)
    assert bool(found) == bool(said)


def test_without_a_limit_or_a_past_nothing_is_one():
    assert not after(NOISY).spike(1e9, 1e9, 0.0)
    assert not after(NOISY[1:]).spike(1e9, 1e9, 6.0)


def test_where_all_steps_were_alike_the_least_rise_is_one():
    assert after([1.0] * LEAST).spike(1.0 + 1e-9, 1.0, 6.0)
    assert not after([1.0] * LEAST).spike(1.0, 2.0, 6.0)


@given(st.lists(FINITE, max_size=WINDOW + 20), st.lists(st.booleans(), max_size=10))
def test_a_checkpoint_has_all_of_it(values, left_out):
    history = after(values)
    for is_left_out in left_out:
        history = history.left_out() if is_left_out else history.taken(0.1, 0.2)
    assert History.of({"history": json.loads(json.dumps(history.state()))}) == history
    assert len(history.losses) <= WINDOW
    assert history.skipped == sum(left_out)
    assert history.in_row == next((n for n, is_out in enumerate(reversed(left_out)) if not is_out), len(left_out))


def test_that_of_an_earlier_release_has_none():
    assert History.of({"step": 3}) == History()


@pytest.mark.parametrize(
    "state",
    [
        {"losses": [math.nan], "norms": [1.0]},
        {"losses": [1.0]},
        {"losses": [1.0] * (WINDOW + 1), "norms": [1.0] * (WINDOW + 1)},
        {"skipped": -1},
        {"in_row": 0.5},
        [],
        {},
    ],
)
def test_another_is_refused(state):
    if state:
        state = History().state() | state
    with pytest.raises(CheckpointError, match="history is damaged"):
        History.of({"history": state})
