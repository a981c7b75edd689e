"""Generation: with and without a cache, greedy and sampled, the same tokens as transformers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.continuation import GenerationOptions
from longctx.generation.loop import generate, stream
from longctx.generation.prefill import prefill
from longctx.generation.sampling import Greedy, Sampling
from longctx.model.attention.kv_cache import KVCache
from longctx.model.decoder import Decoder
from tests.longctx.generation.models import CONFIGS, PROMPT, in_transformers, random_model, theirs


@pytest.fixture(scope="module", params=CONFIGS)
def model(request) -> Decoder:
    return random_model(request.param)


@pytest.fixture(scope="module")
def reference(model, tmp_path_factory):
    return in_transformers(model, tmp_path_factory.mktemp("generation") / "hf")


def test_greedy_is_transformers_greedy(model, reference):
    generator, seen = torch.Generator().manual_seed(4), set()
    for length in (1, 2, 5, 8, 13, 33, 64, 100):
        prompt = torch.randint(97, (length,), generator=generator).tolist()
        found = generate(model, prompt, 24)
        assert found == theirs(reference, prompt, 24, do_sample=False)
        seen |= set(found)
    assert len(seen) > 10, "models that repeat one token prove little"


@pytest.mark.few(7)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.7},
        {"temperature": 1.5, "top_k": 10},
        {"top_p": 0.8},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
        {"top_p": 1e-9},
        {"top_k": 10_000},
        {"min_p": 0.1},
        {"temperature": 1.5, "top_k": 40, "top_p": 0.97, "min_p": 0.05},
    ],
)
def test_sampling_is_transformers_sampling_token_for_token(model, reference, options):
    found = generate(model, PROMPT, 30, Sampling(seed=11, **options))
    assert found == theirs(reference, PROMPT, 30, do_sample=True, **({"top_k": 0} | options))


def test_what_generation_leaves_behind_serves_other_modes(model):
    """Generation runs in inference mode: its cache goes on outside of it, and training trains."""
    cache, new_ids = KVCache(), generate(model, PROMPT, 9)
    with torch.inference_mode():
        prefill(model, PROMPT + new_ids[:-1], cache)
    with torch.no_grad():
        cached = model(torch.tensor([new_ids[-1:]]), torch.tensor([[cache.num_tokens]]), cache=cache)
        ids = torch.tensor([PROMPT + new_ids])
        whole = model(ids, torch.arange(ids.shape[1])[None])
    torch.testing.assert_close(cached[:, -1], whole[:, -1], atol=1e-5, rtol=1e-4)
    model(ids, torch.arange(ids.shape[1])[None]).sum().backward()
    model.zero_grad()


def test_each_step_sees_the_logits_of_a_whole_forward(model):
    """The prompt is read once, one token a step follows, and every logit is that of reading all of it at once."""
    seen, lengths = [], []

    class Spy(Greedy):
        def start(self):
            return lambda logits_V: (seen.append(logits_V), super(Spy, self).start()(logits_V))[1]

    handle = model.model.embed_tokens.register_forward_hook(lambda m, args, out: lengths.append(args[0].shape[1]))
    ids = PROMPT + generate(model, PROMPT, 12, Spy())
    handle.remove()
    assert lengths == [len(PROMPT)] + [1] * 11
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), torch.arange(len(ids))[None])
        whole = model.logits(hidden)[0, len(PROMPT) - 1 : -1]
    assert torch.allclose(torch.stack(seen), whole, atol=1e-5)


def test_seeds(model):
    def draw(seed: int) -> list[int]:
        return generate(model, PROMPT, 20, Sampling(seed=seed))

    torch.manual_seed(0)
    first = draw(1)
    torch.manual_seed(99)  # nobody else's generator matters
    assert draw(1) == first
    assert draw(2) != first
    strategy = Sampling(seed=1)
    assert generate(model, PROMPT, 20, strategy) == generate(model, PROMPT, 20, strategy) == first


def test_only_the_first_ids_are_chosen(model):
    whole = generate(model, PROMPT, 12)
    limit = max(whole)
    ids = list(stream(model, PROMPT, GenerationOptions(max_new_tokens=12, num_choices=limit)))
    with torch.no_grad():
        for number, token in enumerate(ids):
            before = torch.tensor([PROMPT + ids[:number]])
            logits = model.logits(model(before, torch.arange(before.shape[1])[None]))[0, -1]
            assert token == int(logits[:limit].argmax())
    sampled = stream(model, PROMPT, GenerationOptions(max_new_tokens=12, num_choices=3, strategy=Sampling()))
    assert set(sampled) <= {0, 1, 2}
    with pytest.raises(ConfigError, match="num_choices=3"):
        stream(model, PROMPT, GenerationOptions(max_new_tokens=1, num_choices=3, strategy=Beams(num_beams=2)))


def test_stopping(model):
    whole = generate(model, PROMPT, 30)
    stop = whole[4]
    end = whole.index(stop) + 1
    assert generate(model, PROMPT, 30, stop_ids=[stop]) == whole[:end]
    assert generate(model, PROMPT, 0) == []


@settings(max_examples=100, deadline=None)
@given(
    logits=st.lists(st.floats(-20, 20, width=32), min_size=1, max_size=30),
    temperature=st.floats(0.05, 5),
    top_k=st.integers(0, 40),
    top_p=st.floats(0.01, 1),
    min_p=st.floats(0, 1),
)
def test_the_sampled_distribution(logits, temperature, top_k, top_p, min_p):
    scores = torch.tensor(logits)
    found = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p).probabilities(scores)
    assert float(found.sum()) == pytest.approx(1, abs=1e-5)
    full = (scores / temperature).softmax(0)
    kept = found > 0
    assert kept[full.argmax()] or full[kept].max() == full.max()
    if kept.any() and (~kept).any():  # whatever is kept is at least as likely as whatever is not
        assert full[kept].min() >= full[~kept].max() - 1e-6
    if top_k == 0 and top_p == 1 and min_p == 0:
        assert torch.allclose(found, full)


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (lambda m: generate(m, [], 3), "empty"),
        (lambda m: generate(m, PROMPT, -1), "max_new_tokens=-1"),
        (lambda m: generate(m, [97], 3), "97 .*0 to 96"),
        (lambda m: Sampling(temperature=0), r"temperature=0.*Greedy"),
        (lambda m: Sampling(temperature=float("nan")), "temperature=nan"),
        (lambda m: Sampling(top_p=0), "top_p=0"),
        (lambda m: Sampling(top_p=1.1), "top_p=1.1"),
        (lambda m: Sampling(top_k=-1), "top_k=-1"),
        (lambda m: Sampling(min_p=1.5), "min_p=1.5"),
        (lambda m: Sampling(min_p=-0.1), "min_p=-0.1"),
    ],
)
def test_refusals(model, request_, said):
    with pytest.raises(ConfigError, match=said):
        request_(model)
