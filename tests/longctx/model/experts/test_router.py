"""Routing by definition: who goes where, what it weighs, and what neither depends on.

Axes: N tokens, M model width, E experts, k experts a token.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from longctx.config import ModelConfig
from longctx.errors import ConfigError
from longctx.model.experts import router as module
from longctx.model.experts.replay import RoutingReplay
from longctx.model.experts.router import Router, route
from longctx.model.training_pass import TrainingPass
from longctx.objectives.causal_lm import CausalLM
from tests.longctx.samples import BATCH, exact_lm, gradients, randomize, tiny_config
from tests.rounding import UNIT

N, E, K = 23, 12, 3

RULES = {
    "softmax": {},
    "softmax, as they are": {"normalize_gates": False},
    "softmax, in groups": {"expert_groups": 4, "groups_per_token": 2},
    "sigmoid": {"score_function": "sigmoid", "routed_scale": 2.5},
    "sigmoid, as they are": {"score_function": "sigmoid", "normalize_gates": False},
    "biased": {"selection_bias": True},
    "deepseek v3": {
        **{"score_function": "sigmoid", "selection_bias": True, "routed_scale": 2.5},
        **{"expert_groups": 3, "groups_per_token": 2},
    },
    "one expert": {"experts_per_token": 1, "normalize_gates": False},
    "all experts": {"experts_per_token": E},
}


def rules(name: str) -> ModelConfig:
    return tiny_config(num_experts=E, **{"experts_per_token": K, **RULES[name]})


def logits_and_bias(config: ModelConfig, *, tokens: int = N) -> tuple[Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(tokens, E, generator=generator, dtype=torch.float64) * 2
    bias = torch.randn(E, generator=generator, dtype=torch.float64) * 0.3 if config.selection_bias else None
    return logits.requires_grad_(), bias


def chosen_by_definition(scores: list[float], config: ModelConfig) -> list[int]:
    """Of one token: the k best experts of the best groups."""
    size = E // config.expert_groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.expert_groups)]
    best_of = 2 if config.selection_bias else 1
    of_groups = [sum(sorted((scores[e] for e in group), reverse=True)[:best_of]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: -of_groups[g])[: config.groups_per_token]
    reachable = [e for g in kept for e in groups[g]]
    return sorted(reachable, key=lambda e: -scores[e])[: config.experts_per_token]


def by_definition(logits: Tensor, config: ModelConfig, bias: Tensor | None) -> tuple[list[list[int]], Tensor, Tensor]:
    """Ids, gates and probabilities, token by token."""
    ids, gates, probs = [], [], []
    for row in logits:
        score = row.exp() / row.exp().sum() if config.score_function == "softmax" else 1 / (1 + (-row).exp())
        chosen = chosen_by_definition((score if bias is None else score + bias).tolist(), config)
        gate = torch.stack([score[e] for e in chosen])
        gate = gate / gate.sum() if config.normalize_gates else gate
        ids.append(chosen)
        gates.append(gate * config.routed_scale)
        probs.append(score / score.sum())
    return ids, torch.stack(gates), torch.stack(probs)


@pytest.mark.parametrize("name", RULES)
def test_routing_is_its_definition(name):
    config = rules(name)
    logits, bias = logits_and_bias(config)
    found = route(logits, config, bias_E=bias)
    ids, gates, probs = by_definition(logits, config, bias)
    assert found.experts_Nk.tolist() == ids
    torch.testing.assert_close((found.gates_Nk, found.probs_NE), (gates, probs), rtol=1e-13, atol=1e-15)
    weights = [torch.randn(x.shape, dtype=torch.float64) for x in (gates, probs)]
    grads = [
        torch.autograd.grad(sum((w * x).sum() for w, x in zip(weights, of, strict=True)), logits)[0]
        for of in ((found.gates_Nk, found.probs_NE), (gates, probs))
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", RULES)
def test_replayed_choices_are_weighed_as_if_chosen(name):
    config = rules(name)
    logits, bias = logits_and_bias(config)
    chosen = route(logits, config, bias_E=bias)
    again = route(logits, config, replay_Nk=chosen.experts_Nk)
    for a, b in zip(again, chosen, strict=True):
        assert torch.equal(a, b)
    other = route(logits.flip(1), config, replay_Nk=chosen.experts_Nk)
    assert torch.equal(other.experts_Nk, chosen.experts_Nk)
    scores = logits.flip(1).softmax(-1) if config.score_function == "softmax" else logits.flip(1).sigmoid()
    wanted = scores.gather(1, chosen.experts_Nk)
    wanted = wanted / wanted.sum(1, keepdim=True) if config.normalize_gates else wanted
    torch.testing.assert_close(other.gates_Nk, wanted * config.routed_scale)


def test_a_choice_that_leads_nowhere_weighs_nothing():
    config = rules("softmax")
    logits, _ = logits_and_bias(config, tokens=3)
    given = torch.tensor([[4, -1, 7], [-1, -1, -1], [0, 1, -1]])
    found = route(logits, config, replay_Nk=given)
    scores = logits.softmax(-1)
    for n, ids in enumerate(given.tolist()):
        total = sum(scores[n, e] for e in ids if e >= 0)
        for gate, e in zip(found.gates_Nk[n], ids, strict=True):
            torch.testing.assert_close(gate, scores[n, e] / total if e >= 0 else torch.zeros_like(gate))
    found.gates_Nk.square().sum().backward()
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
    assert logits.grad[1].count_nonzero() == 0


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", RULES)
def test_ids_are_in_range_whatever_the_logits(name, value):
    """They index weights and count loads before anyone looks at the numbers."""
    config = rules(name)
    logits, bias = logits_and_bias(config)
    with torch.no_grad():
        logits[0] = value
        logits[1, 4] = value
        logits[2, :10] = value
    ids = route(logits.detach(), config, bias_E=bias).experts_Nk
    assert ids.min() >= 0
    assert ids.max() < E
    assert all(len(set(row)) == config.experts_per_token for row in ids.tolist())


# The projection


def plain_logits(x: Tensor, router: Router) -> Tensor:
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    bias = None if router.bias is None else router.bias.to(wide)
    return torch.nn.functional.linear(x.to(wide), router.weight.to(wide), bias)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_logits_are_a_float32_product(dtype, biased, monkeypatch):
    """Values and gradients as autograd's; in bfloat16 some rows at a time.

    Sums of 32 products, or 29, may be formed in another order: they are that many roundings of float32 apart at most.
    In bfloat16, where they are rounded besides, to two sides if it comes to that, they are neighbours.
    """
    router = Router(tiny_config(router_bias=biased))
    randomize(router)
    router = router.to(dtype)
    for chunk in (module._CHUNK_VALUES, 32 * 10, 1):
        monkeypatch.setattr(module, "_CHUNK_VALUES", chunk)
        results = []
        for function in (router, lambda x: plain_logits(x, router)):
            x = torch.randn(29, 32, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
            router.zero_grad()
            logits = function(x)
            assert logits.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
            (logits * torch.linspace(-1, 1, 29 * 4).view(29, 4).to(logits.dtype)).sum().backward()
            results.append((logits.detach(), x.grad, *gradients(router).values()))
        rtol = {torch.float64: 32 * 2.0**-53, torch.float32: 32 * 2.0**-24, torch.bfloat16: 2 * UNIT}[dtype]
        atol = 32 * 2.0 ** (-53 if dtype == torch.float64 else -24)  # terms are around 1 or smaller
        torch.testing.assert_close(*results, rtol=rtol, atol=atol)


def test_the_router_keeps_no_float32_copy_of_a_bfloat16_input():
    router, kept = Router(tiny_config()).bfloat16(), []
    randomize(router)
    x = torch.randn(29, 32).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        router(x)
    assert {t.data_ptr() for t in kept} == {x.data_ptr(), router.weight.data_ptr()}
    router(torch.randn(0, 32).bfloat16()).sum().backward()
    assert gradients(router)["weight"].count_nonzero() == 0


# Replay


def routed(lm: CausalLM, replay: RoutingReplay):
    """What the model gives when it records into, or follows, the replay."""
    return lm(BATCH, TrainingPass(replay=replay))


@pytest.mark.parametrize("keep", ["all", "attention"])
def test_a_replay_makes_the_recorded_choices_again(keep):
    first, second = exact_lm(keep=keep), exact_lm(keep=keep)
    randomize(second, seed=5)  # another model, which would choose otherwise
    replays = RoutingReplay(), RoutingReplay()
    for lm, replay in zip((first, second), replays, strict=True):
        routed(lm, replay)[0].backward()
    recorded, own = (replay.experts_LNk for replay in replays)
    assert recorded.shape == (2, BATCH.tokens.numel(), 2)
    assert not torch.equal(recorded, own)
    for ids in (own, own.to(torch.int16), list(own)):  # its own choices change no bit
        again = exact_lm(keep=keep)
        randomize(again, seed=5)
        results = (second(BATCH), routed(again, RoutingReplay(ids)))
        torch.testing.assert_close(*results, rtol=0, atol=0)
        routed(again, RoutingReplay(ids))[0].backward()
        for name, grad in gradients(again).items():
            assert torch.equal(grad, gradients(second)[name]), name
    replay = RoutingReplay(recorded)
    counts = second.loss_sum(routed(second, replay)).counts_LE
    assert torch.equal(counts, first.loss_sum(first(BATCH)).counts_LE)
    assert torch.equal(replay.experts_LNk, recorded)


def test_replayed_layers_are_numbered_among_those_with_experts():
    lm = exact_lm(num_layers=4, dense_layers=(0, 2))
    recorded = RoutingReplay()
    routed(lm, recorded)
    ids = recorded.experts_LNk
    assert len(ids) == 2
    for given in (ids, ids.flip(0)):
        counts = lm.loss_sum(routed(lm, RoutingReplay(given))).counts_LE
        is_real = BATCH.document_ids.flatten() >= 0
        wanted = [torch.bincount(layer[is_real].flatten(), minlength=4) for layer in given]
        assert torch.equal(counts, torch.stack(wanted))


def test_a_replay_that_does_not_fit_is_refused():
    lm, recorded = exact_lm(), RoutingReplay()
    routed(lm, recorded)
    ids = recorded.experts_LNk
    wrong = {
        "layers": (ids[:1], "1 layers"),
        "tokens": (ids[:, :5], r"\(5, 2\)"),
        "experts a token": (ids[..., :1], r"\(40, 1\)"),
        "an expert too many": (ids.where(ids != 3, 4), "ids from 0 to 4"),
        "a negative id": (ids.where(ids != 3, -2), "ids from -2"),
    }
    for given, said in wrong.values():
        with pytest.raises(ConfigError, match=said):
            routed(lm, RoutingReplay(given))
