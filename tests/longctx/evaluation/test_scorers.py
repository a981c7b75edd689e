"""Scores by hand: right, wrong, and the near misses."""

from __future__ import annotations

import pytest

from longctx.evaluation.scorers import (
    clean_output,
    contains_all,
    contains_any,
    repeated_after_code,
    set_f1,
    starts_with,
)


@pytest.mark.parametrize(
    ("output", "score"),
    [
        (" 1234567.", 1),
        ("1234567", 1),
        (' "1234567"', 1),
        ("1234567, I think", 1),
        ("12345678", 0),
        ("1234567.8", 0),
        ("123456", 0),
        ("It is 1234567", 0),
        ("1234567-a", 0),
        ("", 0),
    ],
)
def test_begins_with_takes_whole_words_and_numbers(output: str, score: float):
    assert starts_with(output, ["1234567"]) == score


@pytest.mark.parametrize(
    ("output", "references", "all_of_them", "any_of_them"),
    [
        ("Paris", ["Paris", "City of Paris"], 0.5, 1),
        ("it is in PARIS now", ["paris"], 1, 1),
        ("the 71234567 and others", ["1234567"], 1, 1),
        ("a, c", ["a", "b", "c"], 2 / 3, 1),
        ("London", ["Paris"], 0, 0),
        ("anything", [""], 1, 1),
        ("", ["a"], 0, 0),
    ],
)
def test_nvidia_rules(output: str, references: list[str], all_of_them: float, any_of_them: float):
    assert contains_all(output, references) == pytest.approx(all_of_them)
    assert contains_any(output, references) == any_of_them


def test_control_characters_become_new_lines():
    assert clean_output("  a\x00b\t ") == "a\nb"
    assert clean_output("\x01 a") == "a"


@pytest.mark.parametrize(
    ("output", "score"),
    [
        (" [aa, bb, cc]", 1),
        ("[cc, aa, bb] and more [dd]", 1),
        ("aa, bb, cc\nand so on", 1),
        ("[aa, bb, cc", 1),
        ("[aa, aa, bb, cc]", 1),
        ("[aa, bb]", 0.8),
        ("[aa, bb, cc, dd]", 6 / 7),
        ("[dd]", 0),
        ("[]", 0),
        ("", 0),
    ],
)
def test_set_f1(output: str, score: float):
    assert set_f1(output, ["aa", "bb", "cc"]) == pytest.approx(score)


def test_set_f1_of_nothing():
    assert set_f1("[]", []) == 1
    assert set_f1("[a]", []) == 0


@pytest.mark.parametrize(
    ("output", "score"),
    [
        ("kato abcd", 1),
        (" kato\nabcd", 1),
        ("abcd", 0),
        ("the kato abcd", 0),
        ("kato abce", 0.75),
        ("kato ab", 2 * 2 / 6),
        ("kato", 0),
    ],
)
def test_repeated_after_code(output: str, score: float):
    assert repeated_after_code(output, ["kato abcd", "kato"]) == pytest.approx(score)
