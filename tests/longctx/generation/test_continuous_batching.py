"""Many prompts under way together: the tokens of each alone, whoever else is there."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.continuous_batching import generate_batch
from longctx.generation.loop import generate
from longctx.generation.penalties import Penalties
from longctx.generation.sampling import Greedy, Sampling
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.sequence_plans import SlotPlan
from longctx.model.attention.slots import SLOT_TOKENS
from longctx.model.decoder import Decoder
from tests.longctx.cached_models import MODELS, config_of, ids_of
from tests.longctx.generation.models import random_model

LENGTHS = (13, 1, 30, 2, 13, 7, 19)


def prompts_of(lengths, seed: int = 4) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(97, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", MODELS)
def test_every_kind_of_attention_and_experts(name):
    # The last two enter together, with as many tokens each.
    prompts = [*(ids_of(length) for length in (13, 1, 6)), ids_of(13)[:6]]
    for kernel in ("blockwise", "auto"):
        decoder = Decoder(config_of(name), {"softmax": LocalAttention(kernel)}).double()
        wanted = [generate(decoder, prompt, 6) for prompt in prompts]
        found = dict(generate_batch(decoder, prompts, 6, max_sequences=2, chunk_tokens=12))
        assert [found[index] for index in range(4)] == wanted, kernel


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_sequences_outgrow_their_slots_one_by_one(name):
    """Short sequences share memory and calls; one that becomes long goes on alone, and a slot serves the next."""
    model = random_model(name)
    prompts = prompts_of((SLOT_TOKENS - 3, 7, SLOT_TOKENS - 8, SLOT_TOKENS + 5, 90, 1))
    wanted = [generate(model, prompt, 12) for prompt in prompts]
    together = []
    with patch.object(SlotPlan, "forward", autospec=True, side_effect=counted(SlotPlan.forward, together)):
        found = dict(generate_batch(model, prompts, 12, max_sequences=4))
    assert [found[index] for index in range(len(prompts))] == wanted
    assert set(together) == {2, 3}, "sequences that one call attends for"


def counted(attend, counts: list[int]):
    """``attend`` that notes how many tokens it serves."""

    def noted(self, *args):
        counts.append(len(self.tokens))
        return attend(self, *args)

    return noted


@pytest.mark.parametrize("name", ["moe", "dense"])
@pytest.mark.parametrize("strategy", [Greedy(), Sampling(seed=3, temperature=1.2, top_p=0.95), Beams(num_beams=2)])
def test_tokens_are_those_of_each_prompt_alone(name, strategy):
    model, prompts = random_model(name), prompts_of(LENGTHS)
    options = {"stop_ids": range(0, 97, 9), "penalties": Penalties(repetition=1.1, presence=0.2, frequency=0.1)}
    strategies = [strategy] * len(prompts)
    if isinstance(strategy, Sampling):
        strategies = [replace(strategy, seed=3 + n) for n in range(len(prompts))]
    wanted = {n: generate(model, prompts[n], 17, of_prompt, **options) for n, of_prompt in enumerate(strategies)}
    assert len({len(ids) for ids in wanted.values()}) > 1, "they end at different times"
    found = list(generate_batch(model, prompts, 17, strategy, max_sequences=3, **options))
    assert dict(found) == wanted
    assert len(found) == len(prompts)


def test_equal_prompts_sample_for_themselves():
    model, strategy = random_model("dense"), Sampling(seed=3)
    first, *others = (ids for _, ids in sorted(generate_batch(model, [[5, 8]] * 4, 12, strategy)))
    assert first not in others
    # A rank's part of a longer list: each prompt keeps its number there.
    assert dict(generate_batch(model, [[5, 8]] * 2, 12, strategy, numbers=[2, 0])) == {0: others[1], 1: first}


@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(1, 12), max_size=6), most=st.integers(1, 7), new=st.integers(0, 6))
def test_any_number_of_prompts(lengths, most, new):
    model, prompts = random_model("dense"), prompts_of(lengths)
    found = dict(generate_batch(model, prompts, new, max_sequences=most))
    assert found == {n: generate(model, prompt, new) for n, prompt in enumerate(prompts)}


def test_a_sequence_that_has_ended_leaves_and_the_next_enters():
    """One pass reads one token of each that is under way: as many passes as the longest chain needs, no more."""
    model, prompts = random_model("dense"), prompts_of((5, 5, 5, 5))
    passes: list[int] = []
    hook = model.model.embed_tokens.register_forward_hook(lambda module, args, out: passes.append(args[0].shape[1]))
    alone = [generate(model, prompt, 20) for prompt in prompts]
    passes.clear()
    stop = alone[0][2]
    order = [index for index, _ in generate_batch(model, prompts, 20, stop_ids=[stop], max_sequences=2)]
    hook.remove()
    assert sorted(order) == [0, 1, 2, 3]
    assert order[0] == 0, "the one that ends first comes first"
    assert set(passes) <= {10, 5, 2, 1}, "two prompts together, one prompt, tokens of two, of one"
    assert passes[0] == 10
    # After the first has left, the third prompt is read while the second is still under way.
    assert passes.index(5) < len(passes) - passes[::-1].index(2)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda m: generate_batch(m, [[1], []], 3), "prompt 1 of 2: .*empty"),
        (lambda m: generate_batch(m, [[1]], 3, max_sequences=0), "max_sequences=0"),
    ],
)
def test_refusals_come_at_the_call(call, said):
    with pytest.raises(ConfigError, match=said):
        call(random_model("dense"))
