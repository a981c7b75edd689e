"""Initial values in ranges are those of the whole tensor, to the last bit, wherever the ranges begin and end."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.config import ModelConfig
from longctx.model.layers import initialize
from longctx.model.layers.initialize import BLOCK_VALUES, InitialTensor, initial_value

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=40)
NAME = "model.layers.0.mlp.up_proj.weight"


def tensor(numel: int, name: str = NAME, seed: int = 9) -> InitialTensor:
    return InitialTensor(name, numel, CONFIG, seed)


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(initialize, "BLOCK_VALUES", 16)


@pytest.mark.usefixtures("small_blocks")
@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=4))
def test_ranges_in_any_order_are_the_same(numel, ranges):
    whole, values = tensor(numel).read(0, numel), tensor(numel)
    for start, count in ranges:
        start = min(start, numel)
        count = min(count, numel - start)
        assert torch.equal(values.read(start, count), whole[start : start + count])


def test_a_range_far_inside_draws_the_blocks_that_it_is_of(monkeypatch):
    drawn = []
    draw = InitialTensor._draw
    monkeypatch.setattr(
        InitialTensor, "_draw", lambda self, number, out: (drawn.append(number), draw(self, number, out))
    )
    values, numel = tensor(1 << 40), 2000
    start = 77 * BLOCK_VALUES - 1000
    first, second = values.read(start, 1000), values.read(start + 1000, numel - 1000)
    assert torch.equal(torch.cat((first, second)), tensor(1 << 40).read(start, numel))
    assert drawn[:2] == [76, 77]


def test_embeddings_may_begin_larger():
    config = replace(CONFIG, embedding_std=1.5)
    for name, factor in (("model.embed_tokens.weight", 75), ("lm_head.weight", 1), (NAME, 1)):
        plain, mine = (initial_value(name, (7, 9), c, 9) for c in (CONFIG, config))
        torch.testing.assert_close(mine, plain * factor)


@pytest.mark.parametrize(("name", "std"), [(NAME, 0.02), ("model.layers.0.mlp.down_proj.weight", 0.02 / 6**0.5)])
def test_values_are_those_of_a_seed_a_name_and_a_block(name, std):
    """By hand: they may not change from one release to the next, and not from machine to machine."""
    parts = []
    for block, count in ((0, BLOCK_VALUES), (1, 40)):
        digest = hashlib.sha256(f"9:{name}:{block}".encode()).digest()
        generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "big")))
        parts.append(torch.from_numpy(generator.standard_normal(count, dtype=np.float32)) * std)
    whole, numel = torch.cat(parts), BLOCK_VALUES + 40
    assert torch.equal(initial_value(name, (numel,), CONFIG, 9), whole)
    assert torch.equal(tensor(numel, name).read(numel - 100, 90), whole[-100:-10])
    out = torch.empty(700, dtype=torch.bfloat16)
    tensor(numel, name).copy_to(out, 100)
    assert torch.equal(out, whole[100:800].bfloat16())
