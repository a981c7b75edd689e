"""Sentences, windows, and where sentences are inserted."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import DataError
from longctx.evaluation import Haystack
from longctx.evaluation.haystack import insert_sentences, split_sentences

TEXT = "One two three. Four five!  Six\nseven eight nine? Ten."


def test_sentences_end_at_full_stops_before_white_space():
    assert split_sentences("Pi is 3.14. It is. Is it? Yes!") == ["Pi is 3.14.", "It is.", "Is it?", "Yes!"]


def test_a_window_goes_around_the_end_and_cuts_its_last_sentence():
    haystack = Haystack([TEXT, "Eleven twelve"], source="test")
    assert haystack.sentences == ["One two three.", "Four five!", "Six seven eight nine?", "Ten.", "Eleven twelve"]
    assert haystack.num_words == 12
    assert haystack.words[:4] == ["One", "two", "three.", "Four"]
    assert haystack.window(3, 7) == ["Ten.", "Eleven twelve", "One two three.", "Four"]
    assert " ".join(haystack.window(0, 12)).split() == haystack.words


def test_reading_stops_when_there_is_enough(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("longctx.evaluation.haystack.MOST_CHARACTERS", 15)

    def texts():
        yield "One two."
        yield "Three four."
        raise AssertionError("read too much")

    assert Haystack(texts(), source="test").num_words == 4


def test_a_haystack_without_text_is_refused():
    with pytest.raises(DataError, match="haystack nothing contains no text"):
        Haystack(["", " \n "], source="nothing")


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    lengths=st.lists(st.integers(1, 30), max_size=30),
    depths=st.lists(st.floats(0, 1), min_size=1, max_size=5),
)
def test_inserted_sentences_stand_where_they_are_said_to(lengths: list[int], depths: list[float]):
    sentences = ["x" * length for length in lengths]
    needles = [(depth, f"<{number}>") for number, depth in enumerate(depths)]
    text, starts = insert_sentences(sentences, needles)
    for (_, needle), start in zip(needles, starts, strict=True):
        assert text[start : start + len(needle)] == needle
    assert sorted(text.split(" ")) == sorted(sentences + [needle for _, needle in needles])
    deeper = sorted(range(len(depths)), key=lambda number: (depths[number], number))
    assert [starts[number] for number in deeper] == sorted(starts)


def test_a_needle_is_inserted_at_the_nearest_gap():
    sentences = ["a" * 9, "b" * 9, "c" * 9, "d" * 9]
    assert insert_sentences(sentences, [(0.0, "N")])[0].startswith("N a")
    assert insert_sentences(sentences, [(0.3, "N")])[0].split(" ")[1] == "N"
    assert insert_sentences(sentences, [(0.45, "N")])[0].split(" ")[2] == "N"
    assert insert_sentences(sentences, [(1.0, "N")])[0].endswith("d N")
