"""Matrix products of a layer, of bfloat16 in float32 where the caller asks for ``products="float32"``.

A CPU without bfloat16 instructions unpacks every bfloat16 operand again and again: PyTorch's product is then two to
eight times slower than converting once, multiplying in float32 and rounding the result once, which is also more exact.
Both ways run on every processor; ``processor.fastest_products`` says which one is faster on this one.

Axes: N rows (any leading shape), n rows of one tile, I input width, O output width.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.processor import Products

_ROWS = 4096
"""Most rows that are converted at once: what bounds the copies."""


def multiplies_in_float32(x: Tensor, products: Products) -> bool:
    """Whether products of ``x`` are formed in float32 and not in its own dtype."""
    return products == "float32" and x.dtype == torch.bfloat16 and x.device.type == "cpu"


def linear(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, products: Products) -> Tensor:
    """x · weightᵀ + bias in x's dtype, [N, O]."""
    if multiplies_in_float32(x_NI, products):
        return _Float32Linear.apply(x_NI, weight_OI, bias_O)
    return nn.functional.linear(x_NI, weight_OI, bias_O)


def multiply(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, products: Products) -> Tensor:
    """``linear`` without a gradient, for the forward pass of an ``autograd.Function``."""
    if not multiplies_in_float32(x_NI, products):
        return nn.functional.linear(x_NI, weight_OI, bias_O)
    rows_NI, weight_IO = x_NI.reshape(-1, x_NI.shape[-1]), weight_OI.float().T
    out_NO = rows_NI.new_empty(len(rows_NI), weight_OI.shape[0])
    for n in _tiles(len(rows_NI)):
        product = rows_NI[n].float() @ weight_IO
        out_NO[n] = product if bias_O is None else product.add_(bias_O.float())
    return out_NO.view(*x_NI.shape[:-1], weight_OI.shape[0])


def multiply_backward(
    dy_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, *, needs_x: bool, needs_weight: bool, products: Products
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of ``multiply`` for x and the weight, each in its dtype, None where it is not needed."""
    rows_NI, dy_rows_NO = x_NI.reshape(-1, x_NI.shape[-1]), dy_NO.reshape(-1, dy_NO.shape[-1])
    if not multiplies_in_float32(x_NI, products):
        dx = (dy_rows_NO @ weight_OI).view(x_NI.shape) if needs_x else None
        return dx, dy_rows_NO.T @ rows_NI if needs_weight else None
    weight = weight_OI.float() if needs_x else weight_OI
    dx_NI = torch.empty_like(rows_NI) if needs_x else None
    dweight_OI = rows_NI.new_zeros(weight_OI.shape, dtype=torch.float32) if needs_weight else None
    for n in _tiles(len(rows_NI)):
        dy_nO = dy_rows_NO[n].float()
        if dx_NI is not None:
            dx_NI[n] = dy_nO @ weight
        if dweight_OI is not None:
            dweight_OI.addmm_(dy_nO.T, rows_NI[n].float())
    dx = None if dx_NI is None else dx_NI.view(x_NI.shape)
    return dx, None if dweight_OI is None else dweight_OI.to(weight_OI.dtype)


def sum_rows(dy_NO: Tensor) -> Tensor:
    """The gradient of a bias."""
    return dy_NO.flatten(0, -2).sum(0, dtype=accumulate_dtype(dy_NO.dtype)).to(dy_NO.dtype)


class _Float32Linear(torch.autograd.Function):
    """Saves the parameter itself and no copy of it: ZeRO-3 frees a gathered weight by emptying the parameter."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return multiply(x_NI, weight_OI, bias_O, products="float32")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        dx, dweight = multiply_backward(
            dy, *ctx.saved_tensors, needs_x=needs_x, needs_weight=needs_weight, products="float32"
        )
        return dx, dweight, sum_rows(dy) if needs_bias else None


def _tiles(rows: int) -> list[slice]:
    return [slice(start, min(start + _ROWS, rows)) for start in range(0, rows, _ROWS)]
