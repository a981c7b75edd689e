"""The counting of ``tests.lint.style``, on sources small enough to count by eye."""

from __future__ import annotations

from tests.lint.style import (
    LIMITS,
    REPOSITORY,
    Figures,
    Limits,
    broken_limits,
    count,
    long_lines,
    oversized,
)

SOURCE = '''\
"""A module."""

import os  # noqa: F401


class Thing:
    """A class
    of six lines."""

    # why
    size = 1 if os else 2


def act(*values, first, **options):
    """Act."""
    a, *rest = values
    return [*rest, *values], act(*rest, first=first, **options), f"{1 if a else 2}"
'''


def test_code_lines_are_neither_blank_nor_comment_nor_docstring():
    figures = count(SOURCE, "a.py")
    assert figures.code == 6
    assert figures.comments == 1


def test_ternaries_and_the_unpackings_of_calls_and_literals():
    figures = count(SOURCE, "a.py")
    assert figures.ternaries == 2
    assert figures.stars == 3  # neither `*values` of a signature nor `*rest` of an assignment


def test_sizes_have_names():
    figures = count(SOURCE, "a.py")
    assert figures.sizes == [("file", 17, "a.py"), ("class", 6, "a.py:Thing"), ("function", 4, "a.py:act")]
    assert figures.largest("class") == (6, "a.py:Thing")


def test_a_limit_that_is_broken_is_named():
    figures = Figures(code=1000, ternaries=16, stars=6, comments=39)
    said = list(broken_limits("model", figures, Limits(ternaries=15, stars=6, comments=40)))
    assert said == ["model: 16.0 ternaries, more than 15.", "model: 39.0 comments, fewer than 40."]
    assert oversized(Figures(sizes=[("function", 80, "a.py:f"), ("function", 81, "a.py:g")])) == {
        "a.py:g": "a.py:g: a function of 81 lines, more than 80."
    }


def test_long_lines_of_markdown_leave_tables_code_and_lone_links_out():
    long = "x" * 101
    text = f"short\n{long}\n| {long} |\n```\n{long}\n```\n[text](https://{long})\n{long}\n"
    assert long_lines(text) == [2, 8]


def test_every_root_exists():
    assert all((REPOSITORY / root).is_dir() for root in LIMITS)
