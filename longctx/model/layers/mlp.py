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
from longctx.kernels.matmul import add_product_, linear, linear_graph, multiply, multiply_backward, no_values, sum_rows
from longctx.kernels.processor import MatmulMode
from longctx.kernels.quantized_weights import PackedLayout, dequantized
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
        # A multiplies the same activation: its result is computed once, and kept for neither.
        weights = self.weight, self.bias, self._parameters.get("lora_A")
        options: dict[str, Any] = {"matmul_mode": self.matmul_mode, "only_graph": only_graph, "layout": self.layout}
        out_NM, inner_Nr = gated_linear(kind, gate_NF, up_NF, *weights, **options)
        if inner_Nr is None:
            return out_NM
        return self.add_update(out_NM, inner_Nr, only_graph=only_graph)


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
    a_rF: Tensor | None = None,
    *,
    matmul_mode: MatmulMode,
    only_graph: bool = False,
    layout: PackedLayout | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Compute (activation(gate) · up) · weightᵀ + bias, [N, M], and the same product with an adapter's A, [N, r].

    Backward computes activation(gate) · up again, so it is not kept. With ``only_graph`` the first result's values are
    not computed, and it is NaN (``linear_graph``). ``layout`` is a quantized weight's.
    """
    inner_Nr: Tensor | None = None
    if not torch.is_grad_enabled():
        product_NF = gated(kind, gate_NF, up_NF)
        if a_rF is not None:
            inner_Nr = multiply(product_NF, a_rF, matmul_mode=matmul_mode)
        weight_MF = dequantized(weight_MF, layout, gate_NF.dtype)
        return multiply(product_NF, weight_MF, bias_M, matmul_mode=matmul_mode), inner_Nr
    # Its gradient uses autograd, which a graph cannot hold; in a graph the partitioner decides what is kept.
    if kind == "swiglu_oai" and torch.compiler.is_compiling():
        linear_function = linear
        if only_graph:
            linear_function = linear_graph
        product_NF = gated(kind, gate_NF, up_NF)
        if a_rF is not None:
            inner_Nr = linear(product_NF, a_rF, matmul_mode=matmul_mode)
        return linear_function(product_NF, weight_MF, bias_M, matmul_mode=matmul_mode, layout=layout), inner_Nr
    out_NM, inner_Nr = _GatedLinear.apply(
        gate_NF, up_NF, weight_MF, bias_M, a_rF, kind, matmul_mode, only_graph, layout
    )
    return out_NM, inner_Nr


class _GatedLinear(torch.autograd.Function):
    """Autograd function that saves the parameters themselves: ZeRO-3 frees a gathered weight by emptying it."""

    @staticmethod
    def forward(
        ctx: Any,
        gate: Tensor,
        up: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        a: Tensor | None,
        kind: str,
        matmul_mode: MatmulMode,
        only_graph: bool,
        layout: PackedLayout | None,
    ) -> tuple[Tensor, Tensor | None]:
        ctx.save_for_backward(gate, up, weight, a)
        ctx.kind, ctx.products, ctx.layout = kind, matmul_mode, layout
        if only_graph and a is None:
            return no_values(gate, weight, layout), None
        product, inner = gated(kind, gate, up), None
        if a is not None:
            inner = multiply(product, a, matmul_mode=matmul_mode)
        if only_graph:
            return no_values(gate, weight, layout), inner
        weight = dequantized(weight, layout, gate.dtype)
        return multiply(product, weight, bias, matmul_mode=matmul_mode), inner

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor, d_inner: Tensor | None):  # type: ignore[override]
        gate, up, weight, a = ctx.saved_tensors
        # Computed once for the result and up's gradient: the function of gate costs as much as three multiplications.
        activated: Tensor | None = None
        if ctx.kind in _ACTIVATION:
            activated = _ACTIVATION[ctx.kind](gate)
            product = activated * up
        else:
            product = gated(ctx.kind, gate, up)
        needs_weight, needs_bias, needs_a = ctx.needs_input_grad[2:5]
        weight = dequantized(weight, ctx.layout, gate.dtype)
        dproduct, dweight = multiply_backward(
            dout, product, weight, needs_x=True, needs_weight=needs_weight, matmul_mode=ctx.products
        )
        assert dproduct is not None
        da: Tensor | None = None
        if a is not None:
            assert d_inner is not None
            add_product_(dproduct, d_inner, a.T, ctx.products)
            _, da = multiply_backward(
                d_inner, product, a, needs_x=False, needs_weight=needs_a, matmul_mode=ctx.products
            )
        # Backward's memory peaks after this: five tensors of this size are alive, two of them results.
        del product, weight
        dgate, dup = _product_gradient(ctx.kind, dproduct, gate, up, activated)
        dbias: Tensor | None = None
        if needs_bias:
            dbias = sum_rows(dout)
        return dgate, dup, dweight, dbias, da, None, None, None, None


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
