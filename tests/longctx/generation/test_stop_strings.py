"""Stop strings: texts end before them, wherever the borders of tokens lie."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.continuous_batching import generate_batch
from longctx.generation.loop import generate
from longctx.generation.stop_strings import StopStrings, TextBeforeStop
from tests.longctx.generation.models import PROMPT, random_model


def decode(ids) -> str:
    """Two letters a token: the borders of texts and of tokens differ."""
    return "".join("abcdefgh"[id % 8] + "xyz"[id % 3] for id in ids)


def expected(text: str, strings: list[str]) -> str:
    """Character by character: the text before the string that is whole first."""
    for stop in range(1, len(text) + 1):
        ends = [string for string in strings if text[:stop].endswith(string)]
        if ends:
            return text[: stop - max(map(len, ends))]
    return text


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=8),
    strings=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
)
def test_the_text_is_the_same_however_it_is_cut(pieces, strings):
    gate = TextBeforeStop(strings)
    found = "".join(gate.add(piece) for piece in pieces)
    text = "".join(pieces)
    assert text.startswith(found)
    assert gate.is_stopped == any(string in text for string in strings)
    assert found + gate.finish() == expected(text, strings)


def test_nothing_waits_that_cannot_be_a_stop_string():
    gate = TextBeforeStop(["###"])
    assert [gate.add(piece) for piece in ("a", "#", "b##", "c")] == ["a", "", "#b", "##c"]


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_the_token_that_completes_one_is_the_last(name):
    model = random_model(name)
    whole = generate(model, PROMPT, 30)
    text = decode(whole)
    for start in (6, 9, 21):
        string = text[start : start + 3]
        ids = generate(model, PROMPT, 30, stop_strings=StopStrings(decode, [string]))
        assert ids == whole[: len(ids)]
        assert string in decode(ids)
        assert string not in decode(ids[:-1])
        assert dict(generate_batch(model, [PROMPT] * 2, 30, stop_strings=StopStrings(decode, [string])))[1] == ids


def test_the_prompt_has_no_stop_string():
    model = random_model("dense")
    whole = generate(model, PROMPT, 20)
    beginning = decode(PROMPT)[-5:] + decode(whole)[:1]
    assert decode(whole).find(beginning) < 0
    assert generate(model, PROMPT, 20, stop_strings=StopStrings(decode, [beginning])) == whole


def test_beams_end_at_a_stop_string():
    model = random_model("dense")
    whole = generate(model, PROMPT, 10, Beams(num_beams=3))
    letters = decode(whole)[7:10]
    ids = generate(model, PROMPT, 10, Beams(num_beams=3), stop_strings=StopStrings(decode, [letters]))
    assert letters not in decode(ids[:-1])
    assert letters in decode(ids) or len(ids) == 10


def test_an_empty_string_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        StopStrings(decode, ["a", ""])
