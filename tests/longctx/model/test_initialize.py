"""Initial values in ranges are those of one draw, to the last bit, wherever the ranges begin and end."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.config import ModelConfig
from longctx.model.layers import skip_ahead as skipping
from longctx.model.layers.initialize import InitialTensor, NormalSequence, initial_value
from longctx.model.layers.skip_ahead import skip_ahead

CONFIG = ModelConfig(vocab_size=64, hidden_size=32, num_layers=3, num_heads=2, num_kv_heads=1, head_dim=16, ffn_size=40)


def at_once(numel: int, seed: int = 5) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.lists(st.integers(0, 200), max_size=6))
def test_ranges_make_up_what_is_drawn_at_once(numel, cuts):
    whole, values = at_once(numel), NormalSequence(numel, 5)
    edges = sorted({0, numel, *(min(cut, numel) for cut in cuts)})
    parts = [values.read(start, stop - start) for start, stop in itertools.pairwise(edges)]
    assert torch.equal(torch.cat(parts), whole)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 200), st.lists(st.tuples(st.integers(0, 200), st.integers(0, 200)), max_size=4))
def test_ranges_in_any_order_are_the_same(numel, ranges):
    whole, values = at_once(numel), NormalSequence(numel, 5)
    for start, count in ranges:
        start = min(start, numel)
        count = min(count, numel - start)
        assert torch.equal(values.read(start, count), whole[start : start + count])


@pytest.mark.parametrize("numel", [3 << 22, (3 << 22) + 7])
def test_a_range_far_inside_is_drawn_without_what_lies_before_it(numel, monkeypatch):
    whole = at_once(numel)
    start = numel - 1000

    def refuse(*_, **__):
        raise AssertionError("something was drawn to be thrown away")

    monkeypatch.setattr(torch.Tensor, "random_", refuse)
    assert torch.equal(NormalSequence(numel, 5).read(start, 1000), whole[start:])


@pytest.mark.parametrize("draws", [0, 1, 623, 624, 625, (1 << 22) + 1, 10_000_019])
def test_skipping_ahead_is_drawing_and_throwing_away(draws):
    plain, skipped = (torch.Generator().manual_seed(1 << 40 | 77) for _ in range(2))
    for start in range(0, draws, 1 << 20):
        torch.empty(min(1 << 20, draws - start)).uniform_(generator=plain)
    skip_ahead(skipped, draws)
    assert torch.equal(torch.randn(2000, generator=plain), torch.randn(2000, generator=skipped))


def test_a_generator_whose_state_is_not_known_is_drawn_from(monkeypatch):
    """Another release of PyTorch may keep it otherwise: slower then, with the same values."""
    monkeypatch.setattr(skipping, "_STATE_BYTES", 1)
    draws = (1 << 22) + 5
    plain, skipped = (torch.Generator().manual_seed(3) for _ in range(2))
    torch.empty(draws).uniform_(generator=plain)
    skip_ahead(skipped, draws)
    assert torch.equal(torch.randn(100, generator=plain), torch.randn(100, generator=skipped))


@pytest.mark.parametrize(
    ("name", "of_old"),
    [
        ("model.layers.0.mlp.down_proj.weight", lambda x: x * (0.02 / 6**0.5)),
        ("model.layers.0.mlp.up_proj.weight", lambda x: x * 0.02),
    ],
)
def test_values_are_as_they_ever_were(name, of_old):
    """Of a seed and a name: the first eight bytes of their hash seed one draw of the whole tensor."""
    import hashlib

    digest = hashlib.sha256(f"9:{name}".encode()).digest()
    whole = of_old(at_once(40 * 33, int.from_bytes(digest[:8], "big") >> 1))
    assert torch.equal(initial_value(name, (40, 33), CONFIG, 9), whole.view(40, 33))
    assert torch.equal(InitialTensor(name, 40 * 33, CONFIG, 9).read(100, 700), whole[100:800])


def test_norms_and_biases_are_constant_in_any_range():
    assert torch.equal(InitialTensor("model.norm.weight", 32, CONFIG, 0).read(5, 9), torch.ones(9))
    assert torch.equal(InitialTensor("model.layers.0.self_attn.q_proj.bias", 32, CONFIG, 0).read(5, 9), torch.zeros(9))
