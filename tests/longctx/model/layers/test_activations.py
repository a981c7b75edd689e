"""Activations against their definitions, and their gradients."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import gelu, silu

from longctx.architecture.model_rules import CHOICES, GATED
from longctx.model.layers.mlp import PLAIN, gated, gated_backward, gated_linear


def oai(gate, up):
    """GPT-OSS's, as its model card gives it."""
    gate, up = gate.clamp(max=7), up.clamp(-7, 7)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1)


DEFINED = {
    "swiglu": lambda gate, up: silu(gate) * up,
    "geglu": lambda gate, up: gelu(gate) * up,
    "geglu_tanh": lambda gate, up: gelu(gate, approximate="tanh") * up,
    "swiglu_oai": oai,
}


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", GATED)
def test_gated_values_and_gradients(kind, scaled):
    torch.manual_seed(0)
    gate, up, scale = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (5, 3), (5,)))
    with torch.no_grad():
        gate[0], up[0, 0], up[0, 1] = 9.0, 8.0, -8.0  # beyond GPT-OSS's bounds
    inputs = (gate, up, scale) if scaled else (gate, up)
    wanted = DEFINED[kind](gate, up) * (scale[:, None] if scaled else 1)
    dout = torch.randn_like(wanted)
    with torch.no_grad():
        torch.testing.assert_close(gated(kind, *inputs), wanted)
        got = gated_backward(kind, dout.clone(), *inputs)
    torch.testing.assert_close(got[: len(inputs)], torch.autograd.grad(wanted, inputs, dout))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", GATED)
def test_gated_linear_values_and_gradients(kind, biased):
    torch.manual_seed(0)
    shapes = ((2, 5, 3), (2, 5, 3), (4, 3), (4,))
    gate, up, weight, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in shapes)
    inputs = (gate, up, weight, bias) if biased else (gate, up, weight)
    assert torch.autograd.gradcheck(lambda *x: gated_linear(kind, *x, matmul_mode="native")[0], inputs)
    wanted = DEFINED[kind](gate, up) @ weight.T + (bias if biased else 0)
    torch.testing.assert_close(gated_linear(kind, *inputs, matmul_mode="native")[0], wanted)


def test_every_word_has_an_activation():
    assert set(CHOICES["activation"]) == set(GATED) | set(PLAIN)
    x = torch.linspace(-3, 3, 13)
    torch.testing.assert_close(PLAIN["relu2"](x), x.clamp(min=0) ** 2)
    torch.testing.assert_close(PLAIN["silu"](x), x / (1 + torch.exp(-x)))
    torch.testing.assert_close(PLAIN["gelu"](x), x * 0.5 * (1 + torch.erf(x / 2**0.5)))
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    torch.testing.assert_close(PLAIN["quick_gelu"](x), x / (1 + torch.exp(-1.702 * x)))
    torch.testing.assert_close(PLAIN["gelu_tanh"](x), 0.5 * x * (1 + torch.tanh(inner)))


def test_quick_gelu_keeps_one_tensor_for_backward():
    kept = []
    x = torch.randn(5, 3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        PLAIN["quick_gelu"](x * 2)
    assert [tensor.shape for tensor in kept if tensor.dim()] == [x.shape]
