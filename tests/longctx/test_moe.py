"""Router, routed experts and their statistics."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from longctx.model import experts as experts_module
from longctx.model.experts import Experts, grouped_outer, grouped_rows, sort_by_expert
from longctx.model.moe import MixtureOfExperts
from longctx.model.router import Router, router_stats
from tests.longctx.samples import gradients, randomize, tiny_config

N, M, E, K = 29, 32, 4, 2


def routed(dtype=torch.float64, *, N=N, allowed=range(E)):
    """Tokens, gates and choices; only the ``allowed`` experts are chosen."""
    torch.manual_seed(0)
    x = torch.randn(N, M, dtype=torch.float64).to(dtype).requires_grad_()
    gates = torch.rand(N, K, dtype=torch.float64).to(dtype if dtype == torch.float64 else torch.float32)
    choices = torch.stack(
        [torch.tensor(list(allowed))[torch.randperm(len(allowed))[:K]] for _ in range(N)] or [torch.zeros(K)]
    )
    return x, gates.requires_grad_(), choices.long()[:N]


def by_definition(module, x, gates, choices):
    """Token by token, expert by expert."""
    out = torch.zeros_like(x)
    for n, j in ((n, j) for n in range(len(x)) for j in range(K)):
        expert = choices[n, j]
        gate, up = (module.gate_up_proj[expert] @ x[n]).chunk(2)
        row = torch.zeros_like(x)
        row[n] = gates[n, j] * (module.down_proj[expert] @ (silu(gate) * up))
        out = out + row
    return out


def experts(dtype=torch.float64):
    module = Experts(tiny_config())
    randomize(module)
    return module.to(dtype)


@pytest.mark.parametrize("allowed", [range(E), (1, 3)], ids=["all experts", "two idle experts"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_experts_equal_their_definition(dtype, allowed):
    module, (x, gates, choices) = experts(dtype), routed(dtype, allowed=allowed)
    exact = experts().requires_grad_()
    exact.load_state_dict(module.state_dict())
    leaves = [t.detach().double().requires_grad_() for t in (x, gates)]
    wanted, got = by_definition(exact, *leaves, choices), module(x, gates, choices)
    dout = torch.randn(N, M, dtype=torch.float64)
    wanted.backward(dout)
    got.backward(dout.to(got.dtype))
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(got.double(), wanted, atol=tolerance, rtol=tolerance)
    for leaf, exact_leaf in zip((x, gates, *module.parameters()), (*leaves, *exact.parameters()), strict=True):
        scale = exact_leaf.grad.abs().max()
        torch.testing.assert_close(leaf.grad.double() / scale, exact_leaf.grad / scale, atol=tolerance, rtol=tolerance)
    idle = [e for e in range(E) if e not in allowed]
    assert all(grad[idle].count_nonzero() == 0 for grad in gradients(module).values())


@pytest.mark.parametrize("biased", [False, True])
def test_experts_gradcheck(biased):
    config = tiny_config(hidden_size=3, expert_ffn_size=2, expert_bias=biased)
    module, (x, gates, choices) = Experts(config).double(), routed(N=5)
    randomize(module)
    inputs = (x[:, :3].detach().requires_grad_(), gates, *module.parameters())
    assert torch.autograd.gradcheck(lambda x, gates, *_: module(x, gates, choices), inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_product_equals_the_loop(dtype, monkeypatch):
    torch.manual_seed(0)
    ends = torch.tensor([3, 3, 10, 17], dtype=torch.int32)
    x, weight, dy = (torch.randn(s).to(dtype) for s in ((17, 16), (4, 8, 16), (17, 8)))
    monkeypatch.setattr(experts_module, "multiplies_in_float32", lambda *_: False)  # whatever this processor does
    results = []
    for loop in (False, True):
        if loop:
            monkeypatch.setattr(experts_module, "_takes_grouped_mm", lambda *_: False)
        else:
            assert experts_module._takes_grouped_mm(x, weight)
        results.append((grouped_rows(x, weight.mT, ends), grouped_outer(dy, x, ends)))
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5 if dtype == torch.float32 else 2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_odd_widths_take_the_loop(dtype):
    module = MixtureOfExperts(tiny_config(hidden_size=33, expert_ffn_size=7)).to(dtype)
    randomize(module)
    x = torch.randn(2, 5, 33, dtype=dtype, requires_grad=True)
    module(x)[0].float().square().sum().backward()
    assert all(g.isfinite().all() for g in gradients(module).values())


def test_no_token_gives_every_parameter_a_zero_gradient():
    module = MixtureOfExperts(tiny_config())
    randomize(module)
    documents = torch.zeros(1, 0, dtype=torch.int64)
    out, counts, prob_sums = module(torch.randn(1, 0, M), documents_Bt=documents, num_documents=3)
    assert counts.shape == prob_sums.shape == (3, E)
    (out.sum() + prob_sums.sum()).backward()
    assert all(g.count_nonzero() == 0 for g in gradients(module).values())


def test_sorting_is_stable_and_inverts():
    choices = torch.tensor([[2, 0], [0, 2], [2, 3]])
    order, inverse, ends = sort_by_expert(choices, 4)
    assert order.tolist() == [1, 2, 0, 3, 4, 5]
    assert order[inverse].tolist() == list(range(6))
    assert ends.tolist() == [2, 2, 5, 6]
    assert ends.dtype == torch.int32


@pytest.mark.parametrize("normalize", [True, False])
def test_router_is_float32_in_a_bfloat16_model(normalize):
    torch.manual_seed(0)
    router = Router(tiny_config(normalize_gates=normalize))
    randomize(router)
    router, x = router.bfloat16(), torch.randn(N, M).bfloat16()
    gates, probs, choices = router(x)
    exact = (x.double() @ router.weight.double().T).softmax(-1)
    assert probs.dtype == gates.dtype == torch.float32
    torch.testing.assert_close(probs.double(), exact, atol=1e-6, rtol=1e-6)  # bf16 logits would miss by 1e-3
    wanted, chosen = exact.topk(K)
    assert torch.equal(choices, chosen)
    wanted = wanted / wanted.sum(-1, keepdim=True) if normalize else wanted
    torch.testing.assert_close(gates.double(), wanted, atol=1e-6, rtol=1e-6)


def statistics(documents):
    torch.manual_seed(0)
    probs = torch.rand(len(documents), E).softmax(-1).requires_grad_()
    return probs, probs.topk(K)[1], torch.tensor(documents)


def test_stats_count_each_document_and_leave_padding_out():
    probs, choices, documents = statistics([0, 0, 2, -1, 2, 2, -1, 0])
    counts, sums = router_stats(probs, choices, documents, 4)
    for s in range(4):
        assert counts[s].tolist() == [(choices[documents == s] == e).sum().item() for e in range(E)]
        torch.testing.assert_close(sums[s], probs[documents == s].sum(0))
    assert counts.dtype == torch.int64
    weights = torch.rand(4, E)
    (grad,) = torch.autograd.grad((sums * weights).sum(), probs)
    torch.testing.assert_close(grad, weights[documents] * (documents >= 0)[:, None])


def test_stats_of_shards_add_up():
    probs, choices, documents = statistics([0, 0, 0, 1, 1, -1, 3, 3, 3, 3])
    whole = router_stats(probs, choices, documents, 4)
    shards = [torch.tensor(s) for s in ([0, 3, 9], [1, 2, 5, 8], [4, 6, 7], [])]
    parts = [router_stats(probs[s.long()], choices[s.long()], documents[s.long()], 4) for s in shards]
    torch.testing.assert_close(tuple(sum(part) for part in zip(*parts, strict=True)), whole)
