"""``Rate``: what lies between the points of a table, and what is no table."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.plan.rates import Rate, nested, read_rate

SIZES = st.lists(st.integers(1, 10**9), min_size=1, max_size=5, unique=True).map(sorted)
AMOUNTS = st.floats(1e-3, 1e15)


@st.composite
def tables(draw: st.DrawFn) -> Rate:
    """A rate by one or two sizes."""
    axes = {name: tuple(map(float, draw(SIZES))) for name in ("tokens", "width")[: draw(st.integers(1, 2))]}
    count = math.prod(map(len, axes.values()))
    values = draw(st.lists(AMOUNTS, min_size=count, max_size=count))
    return Rate(values={"value": tuple(values)}, axes=axes)


@given(tables(), st.floats(1e-2, 1e12), st.floats(1e-2, 1e12))
def test_a_rate_lies_between_those_of_the_table(rate, tokens, width):
    found = rate.at("float32", tokens=tokens, width=width)
    values = rate.values["value"]
    assert min(values) * (1 - 1e-9) <= found <= max(values) * (1 + 1e-9)


@given(tables())
def test_a_point_has_its_own_value(rate):
    for number, point in enumerate(itertools.product(*rate.axes.values())):
        sizes = dict(zip(rate.axes, point, strict=True))
        assert rate.at(**sizes) == pytest.approx(rate.values["value"][number], rel=1e-9)


@given(SIZES, st.data())
def test_a_rate_that_grows_with_size_grows_between_points(points, data):
    values = tuple(sorted(data.draw(st.lists(AMOUNTS, min_size=len(points), max_size=len(points)))))
    rate = Rate(values={"value": values}, axes={"bytes": tuple(map(float, points))})
    smaller, larger = sorted(data.draw(st.tuples(AMOUNTS, AMOUNTS)))
    assert rate.at(bytes=smaller) <= rate.at(bytes=larger) * (1 + 1e-9)


def test_half_way_is_half_way_in_logarithms():
    rate = Rate(values={"value": (1e9, 4e9)}, axes={"bytes": (100.0, 10000.0)})
    assert rate.at(bytes=1000) == pytest.approx(2e9)
    assert rate.at(bytes=1) == pytest.approx(1e9)
    assert rate.at(bytes=1e9) == pytest.approx(4e9)


def test_each_dtype_has_its_own():
    rate = Rate(values={"float32": (1.0,), "bfloat16": (2.0,)}, axes={})
    assert (rate.at("float32"), rate.at("bfloat16")) == (1.0, 2.0)
    assert not rate.is_plain


@settings(max_examples=30)
@given(tables())
def test_what_is_written_is_read_back(rate):
    section = {name: list(points) for name, points in rate.axes.items()}
    shape = [len(points) for points in rate.axes.values()]
    section |= {"value": nested(rate.values["value"], shape), "source": "here"}
    assert read_rate(section, ("tokens", "width")) == rate


@pytest.mark.parametrize(
    ("section", "problem"),
    [
        ({"value": -1.0}, "not a number above 0"),
        ({"value": True}, "not a number above 0"),
        ({"float32": 1.0}, "one for float32 and one for bfloat16"),
        ({}, "a value"),
        ({"tokens": [2, 1], "value": [1.0, 2.0]}, "not an ascending list"),
        ({"tokens": [1, 2], "value": [1.0]}, "2 numbers above 0"),
        ({"tokens": [1, 2], "width": [3], "value": [1.0, 2.0]}, "2 lists of 1 numbers above 0"),
        ({"bytes": [1, 2], "value": 1.0}, "bytes is not allowed here"),
    ],
)
def test_what_is_no_rate_is_refused(section, problem):
    found = read_rate({**section, "source": "here"}, ("tokens", "width"))
    assert isinstance(found, str)
    assert problem in found
