"""Activations of the FFN, plain and gated, that keep their inputs for backward and nothing else.

Axes: N tokens (any leading shape), F FFN width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.kernels.contract import accumulate_dtype

_gelu_tanh = partial(nn.functional.gelu, approximate="tanh")

PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
}

_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0
"""GPT-OSS's steepness of the sigmoid and bound on both inputs."""


def gated(kind: str, gate_NF: Tensor, up_NF: Tensor, scale_N: Tensor | None = None) -> Tensor:
    """activation(gate) · up, each row times ``scale`` where one is given."""
    return _Gated.apply(gate_NF, up_NF, scale_N, kind)


class _Gated(torch.autograd.Function):
    """Autograd alone would keep the activated gate and the unscaled product too: half as much again per token."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, scale: Tensor | None, kind: str) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        ctx.kind = kind
        product = _product(kind, gate, up)
        return product if scale is None else (product * scale.unsqueeze(-1)).to(product.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):  # type: ignore[override]
        gate, up, scale = ctx.saved_tensors
        dscale = None
        if scale is not None:
            product = _product(ctx.kind, gate, up)
            dscale = product.mul_(dout).sum(-1, dtype=accumulate_dtype(up.dtype)).to(scale.dtype)
            dout = (dout * scale.unsqueeze(-1)).to(dout.dtype)
        dgate, dup = _product_gradient(ctx.kind, dout, gate, up)
        return dgate, dup, dscale, None


def _product(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    if kind == "swiglu":
        return nn.functional.silu(gate).mul_(up)
    if kind == "swiglu_oai":
        gate, up = gate.clamp(max=_OAI_LIMIT), up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
        return (gate * torch.sigmoid(_OAI_ALPHA * gate)).mul_(up + 1)
    return nn.functional.gelu(gate, approximate=_approximation(kind)).mul_(up)


def _product_gradient(kind: str, dout: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    if kind == "swiglu":
        return torch.ops.aten.silu_backward(dout * up, gate), nn.functional.silu(gate).mul_(dout)
    if kind == "swiglu_oai":
        with torch.enable_grad():
            inputs = gate.detach().requires_grad_(), up.detach().requires_grad_()
            bounded, other = inputs[0].clamp(max=_OAI_LIMIT), inputs[1].clamp(-_OAI_LIMIT, _OAI_LIMIT)
            product = bounded * torch.sigmoid(_OAI_ALPHA * bounded) * (other + 1)
        return torch.autograd.grad(product, inputs, dout)  # type: ignore[return-value]
    approximate = _approximation(kind)
    dup = nn.functional.gelu(gate, approximate=approximate).mul_(dout)
    return torch.ops.aten.gelu_backward(dout * up, gate, approximate=approximate), dup


def _approximation(kind: str) -> str:
    return "tanh" if kind == "geglu_tanh" else "none"
