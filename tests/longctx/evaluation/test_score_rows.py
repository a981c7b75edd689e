"""Rows, means with intervals, and the area over lengths, by hand."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import DataError
from longctx.evaluation import TASKS, ScoreRow, Setting, areas_by_task, by_depth, by_length, overall
from longctx.evaluation.intervals import Estimate, estimate, weighted_sum, wilson
from longctx.evaluation.score_rows import area_over_lengths


def row(task: str, length: int, score: float, *, depth: float | None = None, index: int = 0) -> ScoreRow:
    return ScoreRow(
        task=task, length=length, depth=depth, index=index, score=score, prompt_tokens=1, answers=("a",), output="b"
    )


def test_a_row_is_a_line_of_a_table(setting: Setting):
    task = TASKS["passkey"]
    sample = next(task.samples(setting, 512, 5, start=4))
    made = ScoreRow.of(task, sample, sample.target)
    assert list(made.cells()) == ScoreRow.columns()
    assert made.score == 1
    assert (made.task, made.length, made.index, made.depth) == ("passkey", 512, 4, 0.7)
    json.dumps(made.cells())


def test_wilson_is_the_published_interval():
    """Values of statsmodels' proportion_confint(8, 10, method='wilson') and (0, 10)."""
    assert wilson(0.8, 10) == pytest.approx((0.4901625, 0.9433178), abs=1e-6)
    assert wilson(0.0, 10) == pytest.approx((0.0, 0.2775328), abs=1e-6)
    assert wilson(1.0, 10) == pytest.approx((0.7224672, 1.0), abs=1e-6)


def test_estimates_say_how_they_were_found():
    assert estimate([1.0, 0.0, 1.0]).method == "wilson"
    assert estimate([0.5, 0.5]).method == "wilson"
    found = estimate([0.0, 0.5, 1.0, 0.25] * 10)
    assert found.method == "bootstrap"
    # The standard error of the mean, and the normal distribution's 95 %.
    half = 1.96 * np.std([0.0, 0.5, 1.0, 0.25]) / math.sqrt(40)
    assert found.mean == pytest.approx(0.4375)
    assert found.high - found.low == pytest.approx(2 * half, rel=0.1)
    assert found == estimate([0.0, 0.5, 1.0, 0.25] * 10)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from([0.0, 0.3, 1.0]), min_size=1, max_size=40))
def test_an_interval_holds_its_mean(scores: list[float]):
    found = estimate(scores)
    assert 0 <= found.low <= found.mean <= found.high <= 1
    assert found.mean == pytest.approx(sum(scores) / len(scores))
    assert found.count == len(scores)


def test_rows_become_cells():
    rows = [row("b", 2048, 1.0), row("b", 1024, 1.0), row("b", 1024, 0.0), row("a", 1024, 1.0, depth=0.5)]
    cells = by_length(rows)
    assert [(cell.task, cell.length, cell.score.mean, cell.score.count) for cell in cells] == [
        ("b", 1024, 0.5, 2),
        ("b", 2048, 1.0, 1),
        ("a", 1024, 1.0, 1),
    ]
    (cell,) = by_depth(rows)
    assert (cell.task, cell.length, cell.depth, cell.score.count) == ("a", 1024, 0.5, 1)


def test_the_area_counts_each_doubling_the_same():
    rows = [row("a", 1024, 1.0), row("a", 2048, 1.0), row("a", 4096, 0.0)]
    assert areas_by_task(rows)["a"].mean == pytest.approx(0.75)
    # A length four times another counts as two doublings.
    assert areas_by_task([row("a", 1024, 1.0), row("a", 4096, 1.0), row("a", 8192, 0.0)])["a"].mean == pytest.approx(
        5 / 6
    )
    assert areas_by_task([row("a", 1024, 0.5)])["a"].mean == 0.5
    assert overall([*rows, row("b", 1024, 0.25)]).mean == pytest.approx(0.5)


def test_the_interval_of_a_sum_adds_distances_in_quadrature():
    part = Estimate(mean=0.5, low=0.2, high=0.7, count=4, method="wilson")
    found = weighted_sum([(0.5, part), (0.5, part)])
    assert found.mean == pytest.approx(0.5)
    assert found.low == pytest.approx(0.5 - math.hypot(0.15, 0.15))
    assert found.high == pytest.approx(0.5 + math.hypot(0.1, 0.1))
    assert found.count == 8


def test_the_interval_of_an_area_covers_what_it_should():
    """Of 300 made-up models whose scores are known, the interval of 95 % holds the area of nearly all."""
    random = np.random.default_rng(0)
    truth = [0.9, 0.7, 0.4]
    area = (truth[0] + 2 * truth[1] + truth[2]) / 4
    held = 0
    for _ in range(300):
        rows = [
            row("a", 1024 << step, float(random.random() < share))
            for step, share in enumerate(truth)
            for _ in range(20)
        ]
        found = areas_by_task(rows)["a"]
        held += found.low <= area <= found.high
    assert 0.92 <= held / 300 <= 0.99


def test_cells_that_have_no_area_are_refused():
    with pytest.raises(DataError, match=r"lengths \[1024, 1024\] from 2 tasks have no area"):
        area_over_lengths(by_length([row("a", 1024, 1.0), row("b", 1024, 1.0)]))
    with pytest.raises(DataError, match="No sample was scored"):
        overall([])
