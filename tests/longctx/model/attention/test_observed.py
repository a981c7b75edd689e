"""Observed attention: the weights of a head by the definition of softmax, under every rule of masks and scores."""

from __future__ import annotations

import pytest
import torch

from longctx.kernels.attention.bias import alibi_slopes
from longctx.kernels.attention.kernel_interface import ScoreRules
from longctx.model.attention.core import AttentionShapes
from longctx.model.attention.local import LocalAttention
from longctx.model.attention.mask import AttentionMask
from longctx.model.attention.observed import ObservedAttention
from longctx.model.decoder import Decoder
from tests.longctx.model.attention.test_local import visible
from tests.longctx.samples import randomize, tiny_config

BOUNDS = [0, 9, 10, 23]
T, H, K, D = 23, 4, 2, 8
HEAD = 3

MASKS = {
    "full": AttentionMask(BOUNDS),
    "window": AttentionMask(BOUNDS, window=4),
    "sink tokens": AttentionMask(BOUNDS, window=4, sink_tokens=2),
    "stride": AttentionMask(BOUNDS, window=3, stride=4),
    "both ways": AttentionMask(BOUNDS, causal=False),
}


@pytest.mark.parametrize("rules", ["plain", "sink and cap", "alibi"])
@pytest.mark.parametrize("name", MASKS)
def test_weights_are_the_softmax_by_definition(name: str, rules: str):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, T, heads, D, generator=generator) for heads in (H, K, K))
    mask, weights, scores = MASKS[name], (), ScoreRules(scale=0.7)
    if rules == "sink and cap":
        weights, scores = (torch.randn(H, generator=generator),), ScoreRules(scale=0.7, softcap=1.5)
    if rules == "alibi":
        scores = ScoreRules(scale=0.7, alibi_slopes_H=alibi_slopes(H))
    groups = torch.arange(T) // 5
    core = ObservedAttention(call=1, head=HEAD, groups_T=groups)
    plan = core.plan(mask, AttentionShapes.of(q, k, v, scores))
    for _ in range(2):
        assert core.weights_TG is None
        out = core(q, k, v, plan=plan, scores=scores, weights=weights)
    local = LocalAttention()
    plain = local(q, k, v, plan=local.plan(mask, AttentionShapes.of(q, k, v, scores)), scores=scores, weights=weights)
    assert torch.equal(out, plain)

    products = 0.7 * q[0, :, HEAD].double() @ k[0, :, HEAD // (H // K)].double().T
    if scores.softcap:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    apart = (torch.arange(T)[:, None] - torch.arange(T)).abs()
    if scores.alibi_slopes_H is not None:
        products = products - scores.alibi_slopes_H[HEAD].double() * apart
    seen = torch.tensor([[visible(mask, i, j) for j in range(T)] for i in range(T)])
    products = products.masked_fill(~seen, -torch.inf)
    if weights:
        products = torch.cat((products, weights[0][HEAD].double().expand(T, 1)), dim=1)
    weights = products.softmax(-1)[:, :T]
    wanted = torch.zeros(T, 5, dtype=torch.float64).index_add(1, groups, weights)
    assert core.weights_TG is not None
    torch.testing.assert_close(core.weights_TG.double(), wanted, atol=2e-6, rtol=0)
    assert core.is_seen_TG is not None
    assert torch.equal(core.is_seen_TG, torch.zeros(T, 5).index_add(1, groups, seen.float()) > 0)


def test_the_layer_that_was_asked_for_is_observed():
    """The first has a window, the last is full, and the linear one between them has another core."""
    config = tiny_config(num_layers=3, layers=("window", "linear", "full"), window=4)
    tokens = torch.arange(16)[None] % 97
    for call, seen in ((0, 4), (1, 16)):
        core = ObservedAttention(call=call, head=0, groups_T=torch.arange(16))
        decoder = Decoder(config, core and {"softmax": core}, seed=None)
        randomize(decoder, std=0.2)
        decoder.eval()(tokens, torch.arange(16)[None])
        assert core.is_seen_TG is not None
        assert int(core.is_seen_TG[-1].sum()) == seen


def test_a_cache_is_refused():
    with pytest.raises(NotImplementedError, match="one forward pass"):
        ObservedAttention(call=0, head=0, groups_T=torch.arange(4)).new_cache()
