"""Beam search: transformers' tokens, on every path by which a search ends."""

from __future__ import annotations

import pytest

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.loop import generate
from longctx.generation.penalties import Penalties
from tests.longctx.generation.models import PROMPT, in_transformers, random_model, theirs


@pytest.fixture(scope="module", params=["moe", "dense"])
def pair(request, tmp_path_factory):
    model = random_model(request.param)
    return model, in_transformers(model, tmp_path_factory.mktemp("beams") / "hf")


@pytest.mark.few(6)
@pytest.mark.parametrize("num_beams", [2, 4])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -1.0])
def test_beams_are_transformers_beams(pair, num_beams, length_penalty):
    model, reference = pair
    strategy = Beams(num_beams=num_beams, length_penalty=length_penalty)
    options = {"do_sample": False, "num_beams": num_beams, "length_penalty": length_penalty}
    found = generate(model, PROMPT, 14, strategy)
    assert found == theirs(reference, PROMPT, 14, **options)
    # Tokens of the middle as end ids: beams end at different lengths.
    stops = sorted({*found[3:8:2], 1, 50})
    ended = generate(model, PROMPT, 14, strategy, stop_ids=stops)
    wanted = theirs(reference, PROMPT, 14, eos_token_id=stops, pad_token_id=0, **options)
    assert ended == wanted


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
def test_when_a_search_ends(pair, early_stopping):
    model, reference = pair
    stops = list(range(0, 97, 4))
    for length_penalty in (1.0, -1.0):
        strategy = Beams(num_beams=3, length_penalty=length_penalty, early_stopping=early_stopping)
        wanted = theirs(
            reference,
            PROMPT,
            12,
            num_beams=3,
            do_sample=False,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            eos_token_id=stops,
            pad_token_id=0,
        )
        assert generate(model, PROMPT, 12, strategy, stop_ids=stops) == wanted


def test_beams_with_a_repetition_penalty(pair):
    model, reference = pair
    found = generate(model, PROMPT, 14, Beams(num_beams=3), penalties=Penalties(repetition=1.4))
    assert found == theirs(reference, PROMPT, 14, num_beams=3, do_sample=False, repetition_penalty=1.4)


def test_bounds(pair):
    model, _ = pair
    assert generate(model, PROMPT, 0, Beams(num_beams=2)) == []
    assert len(generate(model, PROMPT, 1, Beams(num_beams=50))) == 1
    with pytest.raises(ConfigError, match="num_beams=1"):
        Beams(num_beams=1)
    with pytest.raises(ConfigError, match="length_penalty=nan"):
        Beams(num_beams=2, length_penalty=float("nan"))
