"""Dense FFN, and its activations, which keep only their inputs for backward.

Axes: N tokens (any leading shape), M model width, F FFN width.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.architecture.model_rules import GATED
from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.matmul import linear, linear_graph, multiply, multiply_backward, no_values, sum_rows
from longctx.kernels.processor import MatmulMode
from longctx.model.layers.linear import Linear

_gelu_tanh = partial(nn.functional.gelu, approximate="tanh")
_SIGMOID_SLOPE = 1.702
"""Sigmoid steepness in quick_gelu and GPT-OSS."""


def quick_gelu(x: Tensor) -> Tensor:
    """Return x · sigmoid(1.702 · x), an approximation to GELU."""
    # By silu, which keeps one tensor for backward; the product would keep x and the sigmoid.
    return nn.functional.silu(_SIGMOID_SLOPE * x) / _SIGMOID_SLOPE


PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": nn.functional.gelu,
    "gelu_tanh": _gelu_tanh,
    "quick_gelu": quick_gelu,
    "relu": nn.functional.relu,
    "relu2": lambda x: nn.functional.relu(x).square(),
    "silu": nn.functional.silu,
}

_ACTIVATION: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": nn.functional.silu,
    "geglu": nn.functional.gelu,
    "geglu_tanh": _gelu_tanh,
}
"""For kinds that multiply up by a function of gate alone."""

_ACTIVATION_GRADIENT: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "swiglu": torch.ops.aten.silu_backward,
    "geglu": torch.ops.aten.gelu_backward,
    "geglu_tanh": partial(torch.ops.aten.gelu_backward, approximate="tanh"),
}


class GatedLinear(Linear):
    """Projection after a gated activation; it keeps the activation's two inputs, not its result."""

    def forward(  # type: ignore[override]
        self, gate_NF: Tensor, up_NF: Tensor, kind: str, *, only_graph: bool = False
    ) -> Tensor:
        return gated_linear(
            kind, gate_NF, up_NF, self.weight, self.bias, matmul_mode=self.matmul_mode, only_graph=only_graph
        )


class FeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x))) if the activation has no gate."""

    def __init__(self, config: ModelConfig, ffn_size: int, *, bias: bool = False) -> None:
        super().__init__()
        M, self.activation = config.hidden_size, config.activation
        self.is_gated = config.activation in GATED
        # State dicts and ZeRO's flat buffers follow this order.
        if self.is_gated:
            self.gate_proj = Linear(M, ffn_size, bias=bias)
        self.up_proj = Linear(M, ffn_size, bias=bias)
        if self.is_gated:
            self.down_proj = GatedLinear(ffn_size, M, bias=bias)
        else:
            self.down_proj = Linear(ffn_size, M, bias=bias)

    def forward(self, x_NM: Tensor, *, only_graph: bool = False) -> Tensor:
        """Compute the output; ``only_graph`` returns NaN, for recomputation if backward does not read the output."""
        if self.is_gated:
            gate_NF, up_NF = self.gate_proj(x_NM), self.up_proj(x_NM)
            return self.down_proj(gate_NF, up_NF, self.activation, only_graph=only_graph)
        return self.down_proj(PLAIN[self.activation](self.up_proj(x_NM)), only_graph=only_graph)


_OAI_LIMIT = 7.0
"""GPT-OSS's bound on both inputs."""


def gated(kind: str, gate_NF: Tensor, up_NF: Tensor, scale_N: Tensor | None = None) -> Tensor:
    """Compute activation(gate) · up, each row times ``scale`` if given. Autograd does not record it."""
    product = _product(kind, gate_NF, up_NF)
    if scale_N is None:
        return product
    # Float32 scales: multiplied in float32 and rounded once, without a full float32 tensor.
    return product.mul_(scale_N.unsqueeze(-1))


def gated_backward(
    kind: str, dout_NF: Tensor, gate_NF: Tensor, up_NF: Tensor, scale_N: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute ``gated``'s gradients for gate, up and scale; ``dout`` is overwritten."""
    dscale = None
    if scale_N is not None:
        # One number from F channels: summed in float32.
        product = _product(kind, gate_NF, up_NF)
        dscale = product.mul_(dout_NF).sum(-1, dtype=accumulate_dtype(up_NF.dtype)).to(scale_N.dtype)
        del product
        dout_NF.mul_(scale_N.unsqueeze(-1))
    dgate_NF, dup_NF = _product_gradient(kind, dout_NF, gate_NF, up_NF)
    return dgate_NF, dup_NF, dscale


def gated_linear(
    kind: str,
    gate_NF: Tensor,
    up_NF: Tensor,
    weight_MF: Tensor,
    bias_M: Tensor | None = None,
    *,
    matmul_mode: MatmulMode,
    only_graph: bool = False,
) -> Tensor:
    """Compute (activation(gate) · up) · weightᵀ + bias, [N, M].

    Backward computes activation(gate) · up again, so it is not kept. With ``only_graph`` no value is computed, and the
    result is NaN (``linear_graph``).
    """
    if not torch.is_grad_enabled():
        return multiply(gated(kind, gate_NF, up_NF), weight_MF, bias_M, matmul_mode=matmul_mode)
    # Its gradient uses autograd, which a graph cannot hold; in a graph the partitioner decides what is kept.
    if kind == "swiglu_oai" and torch.compiler.is_compiling():
        linear_function = linear
        if only_graph:
            linear_function = linear_graph
        return linear_function(gated(kind, gate_NF, up_NF), weight_MF, bias_M, matmul_mode=matmul_mode)
    return _GatedLinear.apply(gate_NF, up_NF, weight_MF, bias_M, kind, matmul_mode, only_graph)


class _GatedLinear(torch.autograd.Function):
    """Autograd function that saves the parameter itself: ZeRO-3 frees a gathered weight by emptying it."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        kind: str,
        matmul_mode: MatmulMode,
        only_graph: bool,
    ) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        ctx.kind, ctx.products = kind, matmul_mode
        if only_graph:
            return no_values(gate, weight)
        return multiply(gated(kind, gate, up), weight, bias, matmul_mode=matmul_mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor):  # type: ignore[override]
        gate, up, weight = ctx.saved_tensors
        # Computed once for the result and up's gradient: the function of gate costs as much as three multiplications.
        activated: Tensor | None = None
        if ctx.kind in _ACTIVATION:
            activated = _ACTIVATION[ctx.kind](gate)
            inner = activated * up
        else:
            inner = gated(ctx.kind, gate, up)
        dinner, dweight = multiply_backward(
            dout, inner, weight, needs_x=True, needs_weight=ctx.needs_input_grad[2], matmul_mode=ctx.products
        )
        assert dinner is not None
        # Backward's memory peaks after this: five tensors of this size are alive, two of them results.
        del inner
        dgate, dup = _product_gradient(ctx.kind, dinner, gate, up, activated)
        dbias: Tensor | None = None
        if ctx.needs_input_grad[3]:
            dbias = sum_rows(dout)
        return dgate, dup, dweight, dbias, None, None, None


def _product(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """Compute activation(gate) · up in new memory."""
    if kind == "swiglu_oai":
        gate, up = gate.clamp(max=_OAI_LIMIT), up.clamp(-_OAI_LIMIT, _OAI_LIMIT)
        return (gate * torch.sigmoid(_SIGMOID_SLOPE * gate)).mul_(up + 1)
    return _ACTIVATION[kind](gate).mul_(up)


def _product_gradient(
    kind: str, dout: Tensor, gate: Tensor, up: Tensor, activated: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute gradients for gate and up; overwrite ``dout``, and ``activated``, the function of gate, if given."""
    if kind == "swiglu_oai":
        # PyTorch has no operator for this gradient: autograd composes it, on this product only.
        with torch.enable_grad():
            inputs = gate.detach().requires_grad_(), up.detach().requires_grad_()
            bounded, other = inputs[0].clamp(max=_OAI_LIMIT), inputs[1].clamp(-_OAI_LIMIT, _OAI_LIMIT)
            product = bounded * torch.sigmoid(_SIGMOID_SLOPE * bounded) * (other + 1)
        return torch.autograd.grad(product, inputs, dout)  # type: ignore[return-value]
    if activated is None:
        activated = _ACTIVATION[kind](gate)
    dup = activated.mul_(dout)
    return _ACTIVATION_GRADIENT[kind](dout.mul_(up), gate), dup
