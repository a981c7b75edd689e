"""Reading a prompt chunk by chunk, in one process: the likelihoods and tokens of one pass, and what is stored."""

from __future__ import annotations

from contextlib import ExitStack
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from longctx.errors import ConfigError
from longctx.generation.beams import Beams
from longctx.generation.continuous_batching import generate_batch
from longctx.generation.loop import generate
from longctx.generation.prefill import prefill, read_each, sequence_nll
from longctx.generation.scoring import score_after_context
from longctx.model.attention.kv_cache import KVCache, LayerCache
from longctx.model.attention.local import LocalAttention
from longctx.model.decoder import Decoder
from tests.longctx.cached_models import MODELS, config_of, ids_of, whole_nll, without_cache


def build(name: str) -> Decoder:
    return Decoder(config_of(name), {"softmax": LocalAttention("blockwise")}).double()


@pytest.mark.parametrize("name", MODELS)
def test_chunks_change_no_likelihood(name):
    decoder, ids = build(name), ids_of(38)
    wanted = whole_nll(decoder, ids)
    for chunk_tokens in (5, 16, 37):
        torch.testing.assert_close(sequence_nll(decoder, ids, chunk_tokens=chunk_tokens), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.few(7)
@pytest.mark.parametrize("name", MODELS)
def test_chunks_change_no_token(name):
    decoder = build(name)
    for length in (2, 13):
        wanted = generate(decoder, ids_of(length), 7, chunk_tokens=100)
        assert generate(decoder, ids_of(length), 7, chunk_tokens=4) == wanted
        if name != "dynamic":  # whose keys depend on the length that is known when they are made
            assert without_cache(decoder, ids_of(length), 7) == wanted


def new_cache(decoder: Decoder) -> KVCache:
    """The cache of a model on one process."""
    cache = decoder.new_cache()
    assert isinstance(cache, KVCache)
    return cache


def test_keys_out_of_every_window_are_freed():
    decoder = build("window")
    cache = new_cache(decoder)
    ids = ids_of(560)
    prefill(decoder, ids[:500], cache, 100)
    window, full = (cache.layer(number) for number in range(2))
    assert (window.num_rows, full.num_rows) == (4 + 100, 500)
    assert num_elements(full) == 500 * 2 * 2 * 8, "space for the prompt is made once, and for nothing else"
    for id in ids[500:]:
        prefill(decoder, [id], cache)
    assert (window.num_rows, full.num_rows) == (5, 560)
    assert window.num_tokens == full.num_tokens == cache.num_tokens == 560
    assert num_elements(window) * 4 < num_elements(full)


def test_latent_attention_stores_latents():
    decoder = build("latent")
    cache = new_cache(decoder)
    prefill(decoder, ids_of(64), cache)
    for number in range(2):
        assert num_elements(cache.layer(number)) == 64 * (12 + 4)


def test_the_first_new_tokens_copy_no_key_of_the_prompt():
    """Buffers have space for them from the start, and so have the copies that continuations are read behind."""
    decoder, ids = build("grouped"), ids_of(200)
    with patch.object(LayerCache, "_reallocate", autospec=True, side_effect=LayerCache._reallocate) as laid:
        assert len(generate(decoder, ids, 80, chunk_tokens=64)) == 80
        assert laid.call_count == 2, "one buffer a layer"
        score_after_context(decoder, ids, [[1, 2, 3], [4] * 30], chunk_tokens=64)
    assert laid.call_count == 2 + 2 + 2 * 2, "the context's, and a copy for each continuation"


def test_no_tensor_of_integers_is_as_long_as_the_prompt():
    """Ids of a chunk alone are made a tensor: memory beside the cache does not grow with the prompt."""
    decoder, ids = Decoder(config_of("grouped")), ids_of(400)
    with Written() as counted:
        prefill(decoder, ids, new_cache(decoder), 100)
        read_each(decoder, [ids, ids[:90]], [decoder.new_cache(), decoder.new_cache()], 100)
    assert 100 <= counted.most_integers < 400


@pytest.mark.parametrize("name", ["grouped", "latent", "all kinds", "narrow window", "linear alone"])
def test_a_new_token_costs_no_more_than_its_keys(name):
    """What all operators write for one more token grows at most as the cache, and not at all without a full layer."""
    config = config_of(name)
    decoder = Decoder(config)
    cache = new_cache(decoder)
    written = []
    for length in (512, 1024, 2048):
        prefill(decoder, ids_of(length - cache.num_tokens), cache, 512)
        # A step that makes buffers larger copies them, once in as many tokens as an eighth of them.
        written.append(min(elements_written(decoder, cache) for _ in range(3)))
    grown = [after - before for before, after in pairwise(written)]
    if {"full", "sparse"} & set(config.layers):
        assert grown[1] <= 2.05 * grown[0] + 8
        assert max(grown) <= 4 * 1024 * config.num_heads * config.num_layers
    else:
        assert grown == [0, 0]


def elements_written(decoder: Decoder, cache: KVCache) -> int:
    """Elements that operators lay anew when one token is read; views are none."""
    counted = Written()
    with counted:
        prefill(decoder, [5], cache)
    return counted.elements


class Written(TorchDispatchMode):
    """Counts the elements of results that are no views of arguments, and the most integers of one result."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = self.most_integers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        before = {x.untyped_storage().data_ptr() for x in tree_leaves(args) if isinstance(x, torch.Tensor)}
        for x in tree_leaves(found):
            if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in before:
                self.elements += x.numel()
            if isinstance(x, torch.Tensor) and x.dtype == torch.int64:
                self.most_integers = max(self.most_integers, x.numel())
        return found


def num_elements(layer: LayerCache) -> int:
    """Numbers that a layer's buffers have space for."""
    buffers = [x for x in vars(layer).values() if isinstance(x, torch.Tensor)]
    return sum(x.numel() for x in buffers)


def test_refusals():
    decoder = build("grouped")
    with pytest.raises(ConfigError, match="chunk_tokens=0"):
        generate(decoder, [1, 2], 1, chunk_tokens=0)
    with pytest.raises(ConfigError, match="at least 2"):
        sequence_nll(decoder, [1])


# --- LongRoPE: one table up to 8 tokens, another beyond -------------------------------------------------------------

ACROSS = (5, 8, 1, 7, 13)
"""Lengths of prompts that answers of 12 tokens lead across the switch, at it, and behind it."""


def answers(decoder: Decoder) -> list[list[int]]:
    """Of each prompt alone, of all together, and the best of three beams."""
    prompts = [ids_of(length) for length in ACROSS]
    alone = [generate(decoder, prompt, 12) for prompt in prompts]
    together = dict(generate_batch(decoder, prompts, 12, max_sequences=3, chunk_tokens=3))
    beams = [generate(decoder, prompt, 12, Beams(num_beams=3)) for prompt in prompts]
    return [*alone, *(together[n] for n in range(len(prompts))), *beams]


def test_answers_across_the_switch_of_longrope_are_those_of_reading_all_again():
    decoder = build("longrope")
    found = answers(decoder)
    names = [
        f"longctx.generation.{module}.starts_over" for module in ("loop", "continuous_batching", "decoder_beam_search")
    ]
    with ExitStack() as patched:
        for name in names:
            patched.enter_context(patch(name, lambda model, cache, num_new: cache.num_tokens > 0))
        assert answers(decoder) == found
    with ExitStack() as patched:
        for name in names:
            patched.enter_context(patch(name, lambda *_: False))
        assert answers(decoder) != found, "the tables differ too little to tell"
    for prompt, answer in zip(map(ids_of, ACROSS), found, strict=False):
        assert without_cache(decoder, prompt, 12) == answer


def test_an_answer_across_the_switch_has_the_likelihood_that_it_was_given():
    """Once it is known how long the text is, evaluation reads it as generation did."""
    decoder, prompt = build("longrope"), ids_of(5)
    answer = generate(decoder, prompt, 12)
    for count in (1, 4, 5, 12):
        # The last token's likelihood, by the text up to it.
        score = score_after_context(decoder, prompt + answer[: count - 1], [answer[count - 1 : count]])[0]
        assert score.is_greedy, count
