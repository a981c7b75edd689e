"""The chunked loss against the whole one."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from longctx.batch import IGNORED_TARGET
from longctx.kernels import cross_entropy as chunked
from longctx.kernels.cross_entropy import linear_cross_entropy, token_nll

N, M, V = 23, 8, 31


def inputs(dtype=torch.float64, *, ignored=(0, 5, 22)):
    torch.manual_seed(0)
    hidden = torch.randn(N, M, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, M, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(V, (N,))
    targets[list(ignored)] = IGNORED_TARGET
    return hidden, weight, targets


def whole(hidden, weight, targets, scale=1.0):
    """Loss and gradients with all logits in float64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in (hidden, weight))
    nll = cross_entropy(hidden @ weight.T, targets, reduction="sum", ignore_index=IGNORED_TARGET)
    return nll, *torch.autograd.grad(nll * scale, (hidden, weight))


@pytest.mark.parametrize("chunk_tokens", [1, 7, 23, 1024])
def test_equals_the_whole_loss(chunk_tokens):
    hidden, weight, targets = inputs()
    nll = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    grads = torch.autograd.grad(nll * 3.5, (hidden, weight))
    torch.testing.assert_close((nll, *grads), whole(hidden, weight, targets, 3.5), rtol=1e-12, atol=1e-12)


def test_gradcheck():
    hidden, weight, targets = inputs()
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, chunk_tokens=9), (hidden, weight))


def test_backward_twice_is_the_same():
    hidden, weight, targets = inputs()
    nll = linear_cross_entropy(hidden, weight, targets) * 2
    first = torch.autograd.grad(nll, (hidden, weight), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(nll, (hidden, weight)), first, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_low_precision(dtype):
    hidden, weight, targets = inputs(dtype)
    nll = linear_cross_entropy(hidden, weight, targets, chunk_tokens=7)
    grads = torch.autograd.grad(nll, (hidden, weight))
    assert nll.dtype == torch.float32
    assert {g.dtype for g in grads} == {dtype}
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2  # bf16: logits and their gradient are rounded to 8 bits
    for got, want in zip((nll, *grads), whole(hidden, weight, targets), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_without_a_target_loss_and_gradients_are_zero():
    hidden, weight, targets = inputs(ignored=range(N))
    nll = linear_cross_entropy(hidden, weight, targets, chunk_tokens=7)
    grads = torch.autograd.grad(nll, (hidden, weight))
    assert nll == 0
    assert all(g.count_nonzero() == 0 for g in grads)


def test_without_a_token():
    hidden, weight, targets = (x[:0] if x.shape[0] == N else x for x in inputs())
    nll = linear_cross_entropy(hidden, weight, targets)
    assert nll == 0
    assert torch.autograd.grad(nll, weight)[0].count_nonzero() == 0


@pytest.mark.parametrize("trained", ["hidden", "weight"])
def test_one_side_may_be_frozen(trained):
    hidden, weight, targets = inputs()
    wanted = dict(zip(("hidden", "weight"), whole(hidden, weight, targets)[1:], strict=True))[trained]
    frozen = weight if trained == "hidden" else hidden
    frozen.requires_grad_(False)
    leaf = hidden if trained == "hidden" else weight
    torch.testing.assert_close(torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), leaf)[0], wanted)


def test_no_gradient_work_without_grad(monkeypatch):
    hidden, weight, targets = inputs()
    monkeypatch.setattr(chunked, "_dlogits", None)
    with torch.no_grad():
        nll = linear_cross_entropy(hidden, weight, targets, chunk_tokens=7)
    torch.testing.assert_close(nll, whole(hidden, weight, targets)[0].detach())


def test_token_nll():
    hidden, weight, targets = inputs(torch.float32)
    nll_N = token_nll(hidden, weight, targets, chunk_tokens=7)
    wanted = cross_entropy(hidden @ weight.T, targets, reduction="none", ignore_index=IGNORED_TARGET)
    torch.testing.assert_close(nll_N, wanted.detach())
    assert nll_N.dtype == torch.float32
    assert not nll_N.requires_grad
    assert nll_N[0] == 0
