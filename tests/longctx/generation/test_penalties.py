"""Penalties: the additive ones by their formula, the multiplicative one as transformers has it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError
from longctx.generation.loop import generate
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sampling
from tests.longctx.generation.models import PROMPT, in_transformers, random_model, theirs

IDS = st.lists(st.integers(0, 8), max_size=12)


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=9, max_size=9),
    prompt=IDS,
    new=IDS,
    repetition=st.floats(0.25, 4),
    presence=st.floats(-2, 2),
    frequency=st.floats(-2, 2),
)
def test_the_formula(logits, prompt, new, repetition, presence, frequency):
    """Repetition: ×/÷ by the sign, prompt included. Then − frequency · count − presence · [count > 0], new tokens."""
    wanted = np.array(logits, dtype=np.float64)
    for id in set(prompt + new):
        wanted[id] = wanted[id] * repetition if wanted[id] < 0 else wanted[id] / repetition
    counts = np.bincount(np.array(new, dtype=int), minlength=9)
    wanted -= frequency * counts + presence * (counts > 0)
    given = torch.tensor(logits)
    found = Penalties(repetition=repetition, presence=presence, frequency=frequency).start(prompt)(given, new)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5)
    assert torch.equal(given, torch.tensor(logits)), "the logits themselves stay"


@pytest.mark.parametrize("name", ["moe", "dense"])
def test_repetition_is_transformers_repetition(name, tmp_path):
    model = random_model(name)
    reference = in_transformers(model, tmp_path / "hf")
    for penalty in (1.3, 0.8):
        penalties = Penalties(repetition=penalty)
        wanted = theirs(reference, PROMPT, 30, do_sample=False, repetition_penalty=penalty)
        assert generate(model, PROMPT, 30, penalties=penalties) == wanted
        wanted = theirs(reference, PROMPT, 30, do_sample=True, top_k=12, repetition_penalty=penalty)
        assert generate(model, PROMPT, 30, Sampling(seed=11, top_k=12), penalties=penalties) == wanted


def test_additive_penalties_are_of_new_tokens_alone():
    """A presence penalty that outweighs every logit: no new token comes twice, and the prompt's may come once."""
    model = random_model("dense")
    found = generate(model, PROMPT, 97, penalties=Penalties(presence=1e4))
    assert sorted(found) == list(range(97))
    found = generate(model, PROMPT, 200, Greedy(), penalties=Penalties(frequency=1e4))
    assert max(found.count(id) for id in range(97)) == 3, "97 tokens twice, some for the third time"


@pytest.mark.parametrize(
    ("options", "said"),
    [({"repetition": 0}, "0 must be above 0"), ({"presence": float("nan")}, "presence"), ({"frequency": 1e999}, "inf")],
)
def test_penalties_that_are_none(options, said):
    with pytest.raises(ConfigError, match=said):
        Penalties(**options)


def test_an_id_of_the_prompt_that_has_no_output_has_no_penalty():
    penalize = Penalties(repetition=2.0, presence=0.5).start([1, 3, 4])
    found = penalize(torch.tensor([1.0, 2.0, -1.0]), [2])
    assert found.tolist() == [1.0, 1.0, -2.5]
