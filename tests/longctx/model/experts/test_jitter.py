"""Router jitter: its factors, and that they depend on seed, layer, place and channel and on nothing else."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch
from torch import Tensor

from longctx.model.layers import dropout as module
from longctx.model.layers.dropout import Dropout, Jitter
from longctx.model.training_pass import TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import BATCH, exact_lm
from tests.oracles import mix32, mix64
from tests.rounding import UNIT

M = 256


def factors(width: float = 0.25, *, seed: int = 3, layer: int = 0, tokens: Tensor | None = None) -> Tensor:
    """[t, M] in float64."""
    tokens = torch.arange(512)[None] if tokens is None else tokens
    return Jitter(width, seed, tokens)(torch.ones(*tokens.shape, M, dtype=torch.float64), layer)[0]


@pytest.mark.parametrize("width", [0.01, 0.25, 0.9])
def test_factors_are_even_over_their_range(width):
    found = (factors(width) - 1) / width
    assert found.abs().max() <= 1
    assert found.abs().max() > 0.9999
    spread, count = 3**-0.5, found.numel()
    assert found.mean().abs() < 5 * spread / count**0.5
    assert found.mean(0).abs().max() < 5 * spread / 512**0.5
    assert found.mean(1).abs().max() < 5 * spread / M**0.5
    assert abs(found.square().mean() - 1 / 3) < 5 * 0.3 / count**0.5
    tenths = torch.histc(found, 10, -1, 1) / count
    assert (tenths - 0.1).abs().max() < 5 * (0.09 / count) ** 0.5


def test_seeds_layers_and_places_are_independent_and_so_is_dropout():
    dropped = Dropout(0.5, 3, torch.arange(512)[None])(torch.ones(1, 512, M, dtype=torch.float64), -1)[0]
    found = {
        "base": factors() - 1,
        "seed": factors(seed=4) - 1,
        "layer": factors(layer=1) - 1,
        "next token": factors(tokens=torch.arange(1, 513)[None]) - 1,
        "next channel": (factors() - 1).roll(1, -1),
        "dropout of the embedding": dropped - 1,
    }
    for (a, one), (b, other) in combinations(found.items(), 2):
        alike = (one * other).mean() / (one.square().mean() * other.square().mean()).sqrt()
        assert abs(alike) < 5 / one.numel() ** 0.5, f"{a} and {b}"


def by_whole_numbers(seed: int, layer: int, token: int, channel: int) -> int:
    """The random bits in Python's unbounded whole numbers, signed."""
    key = mix64((mix64(seed % 2**64) - 2 - layer) % 2**64)
    row = mix32((token + key % 2**31) % 2**32) ^ (key >> 32)
    bits = mix32(row ^ (channel * 0x9E3779B1 % 2**32))
    return bits - 2**32 if bits >= 2**31 else bits


def test_the_factors_stay_what_they_are():
    """A resumed run continues with those it would have drawn: a change here breaks that."""
    tokens = [0, 1, 77, 2**31 - 1, 2**32 + 5]
    for seed, layer in ((0, 0), (12345, 7), (2**63 + 7, 60)):
        wanted = [[1 + 0.25 * by_whole_numbers(seed, layer, t, c) / 2**31 for c in range(M)] for t in tokens]
        assert factors(seed=seed, layer=layer, tokens=torch.tensor([tokens])).tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_values_and_gradients_are_multiplied(dtype, monkeypatch):
    tokens = torch.arange(33)[None]
    by = factors(tokens=tokens)
    x = torch.randn(1, 33, M, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
    for chunk in (module._CHUNK_VALUES, 700):
        monkeypatch.setattr(module, "_CHUNK_VALUES", chunk)
        kept, x.grad = [], None
        with torch.autograd.graph.saved_tensors_hooks(lambda t, kept=kept: kept.append(t) or t, lambda t: t):
            out = Jitter(0.25, 3, tokens)(x, 0)
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        assert out.dtype == wide
        close = {"rtol": 1e-15 if dtype == torch.float64 else 1e-6, "atol": 0}
        torch.testing.assert_close(out[0].double(), x.detach()[0].double() * by, **close)
        dy = torch.randn(1, 33, M, dtype=wide)
        out.backward(dy)
        assert x.grad is not None
        rtol = 2 * UNIT if dtype == torch.bfloat16 else 1e-6  # float32 products may round to the other neighbour
        torch.testing.assert_close(x.grad, (dy.double() * by).to(dtype), rtol=rtol, atol=0)
        assert sum(t.numel() * t.element_size() for t in kept) <= 33 * 8


# In the decoder


TRAINING = TrainingPass(seed=11)


def model(**changes) -> CausalLM:
    return exact_lm(**{"router_jitter": 0.3, **changes})


def test_training_alone_jitters():
    lm, plain = model(), model(router_jitter=0.0)(BATCH, TRAINING)
    torch.testing.assert_close(lm(BATCH), plain, rtol=0, atol=0)
    jittered = lm(BATCH, TRAINING)[0]
    assert not torch.equal(jittered, plain[0])
    assert torch.equal(jittered, model()(BATCH, TRAINING)[0])
    assert not torch.equal(jittered, lm(BATCH, TrainingPass(seed=12))[0])
    assert not torch.equal(jittered, lm(BATCH, TrainingPass(seed=11, first_tokens=(1,)))[0])


def test_routers_alone_read_jittered_values():
    """With every expert chosen and equal gates, nothing but the router sees the factors."""
    same = {"experts_per_token": 4, "score_function": "sigmoid", "normalize_gates": False}
    lm, plain = model(**same), model(router_jitter=0.0, **same)
    for each in (lm, plain):
        for layer in each.network.model.layers:
            torch.nn.init.zeros_(layer.mlp.gate.weight)
    torch.testing.assert_close(lm(BATCH, TRAINING), plain(BATCH, TRAINING))
