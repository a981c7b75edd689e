"""The scale benchmark at a small size: every figure has a value, and what must not grow does not."""

from __future__ import annotations

import math

import pytest

from benchmarks import scale
from benchmarks.scaling.figures import Figure


@pytest.fixture(scope="module")
def figures() -> list[Figure]:
    return scale.measure((16, 32), 2**12, documents=500, steps=4)


@pytest.mark.slow
def test_every_figure_stands_at_every_size_and_in_one_table(figures: list[Figure]):
    assert len(figures) > 40
    assert all(list(figure.values) == [16, 32] for figure in figures)
    assert all(math.isfinite(value) and value >= 0 for figure in figures for value in figure.values.values())


@pytest.mark.slow
def test_what_must_not_grow_does_not(figures: list[Figure]):
    found = {(figure.part, figure.case): list(figure.values.values()) for figure in figures}
    for (part, case), values in found.items():
        if part in ("metrics.jsonl, a step", "a step's totals, all-reduced"):
            assert len(set(values)) == 1, case
    entered = [values for (part, _), values in found.items() if part == "groups that a rank makes"]
    assert entered
    assert max(entered[0]) <= 6
    read = [values for (part, _), values in found.items() if part == "checksums that a rank reads"]
    assert read == [[250 * 268_435_456, 125 * 268_435_456]]
