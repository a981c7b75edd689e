"""Products formed in float32, and RMSNorm: against float64, in values, gradients and what is kept for backward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from longctx.kernels import matmul
from longctx.kernels.matmul import linear
from longctx.kernels.rms_norm import rms_norm
from longctx.model.layers.linear import Linear
from longctx.model.layers.norms import RMSNorm


@pytest.fixture
def unpacking_processor(monkeypatch):
    """A processor without bfloat16 instructions, whatever this one is; and tiles of three rows."""
    monkeypatch.setattr(matmul, "has_native_bfloat16", lambda: False)
    monkeypatch.setattr(matmul, "_ROWS", 3)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rows", [(0,), (1,), (2, 4), (7,)], ids=str)
def test_bfloat16_products_are_rounded_once(rows, biased, unpacking_processor):
    torch.manual_seed(0)
    layer = Linear(5, 6, bias=biased)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    layer.bfloat16()
    x, dy = torch.randn(*rows, 5).bfloat16().requires_grad_(), torch.randn(*rows, 6).bfloat16()
    layer(x).backward(dy)
    exact = [t.detach().double().requires_grad_() for t in (x, *layer.parameters())]
    wanted = nn.functional.linear(*exact)
    wanted.backward(dy.double())
    torch.testing.assert_close(layer(x).double(), wanted.bfloat16().double(), atol=0, rtol=2**-7)
    for got, leaf in zip((x, *layer.parameters()), exact, strict=True):
        if got.numel():
            assert (got.grad.double() - leaf.grad).abs().max() <= 2**-8 * leaf.grad.abs().max()


def test_only_what_needs_a_gradient_gets_one(unpacking_processor):
    x, weight = torch.randn(4, 5).bfloat16(), torch.randn(6, 5).bfloat16().requires_grad_()
    linear(x, weight).sum().backward()
    assert x.grad is None
    assert weight.grad is not None
    x, weight = x.requires_grad_(), weight.detach()
    linear(x, weight).sum().backward()
    assert x.grad is not None


def test_other_dtypes_take_the_plain_product():
    x, weight = torch.randn(4, 5), torch.randn(6, 5)
    assert torch.equal(linear(x, weight), nn.functional.linear(x, weight))


@pytest.mark.parametrize("offset", [False, True])
def test_norm_values_and_gradients(offset):
    torch.manual_seed(0)
    x, weight = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((3, 5, 7), (7,)))
    assert torch.autograd.gradcheck(lambda x, w: rms_norm(x, w, 1e-6, offset=offset), (x, weight))
    wanted = nn.functional.rms_norm(x, (7,), weight + 1 if offset else weight, 1e-6)
    torch.testing.assert_close(rms_norm(x, weight, 1e-6, offset=offset), wanted)


def test_norm_keeps_its_input_and_one_number_a_row():
    kept = []
    norm = RMSNorm(64, eps=1e-6).bfloat16()
    nn.init.ones_(norm.weight)
    x = torch.randn(128, 64).bfloat16().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        norm(x)
    assert sum(t.numel() * t.element_size() for t in kept) == 128 * 64 * 2 + 64 * 2 + 128 * 4
