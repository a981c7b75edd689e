"""A layer's matmuls; with ``products="float32"`` bfloat16 is multiplied in float32.

A CPU without bfloat16 instructions unpacks each bfloat16 operand repeatedly: PyTorch's matmul then takes two to eight
times as long as converting once, multiplying in float32 and rounding the result once, which is also more exact. Both
modes run on every processor; ``processor.fastest_matmul_mode`` returns the faster one here.

Axes: N rows (any leading shape), n rows of one tile, I input width, O output width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.kernels.devices import on_cpu
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.processor import MatmulMode, multiplies_rows_as_vectors
from longctx.kernels.quantized_weights import PackedLayout, dequantized

_ROWS = 4096
"""Maximum rows converted at once; bounds the copies."""


def multiplies_in_float32(x: Tensor, matmul_mode: MatmulMode) -> bool:
    """Return whether matmuls with ``x`` run in float32 instead of its own dtype."""
    return matmul_mode == "float32" and x.dtype == torch.bfloat16 and on_cpu(x)


def linear(
    x_NI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    matmul_mode: MatmulMode,
    layout: PackedLayout | None = None,
) -> Tensor:
    """Return x · weightᵀ + bias in x's dtype, [N, O]. ``layout`` is a quantized weight's."""
    if layout is not None and torch.is_grad_enabled():
        # Backward dequantizes again: nothing keeps the values for it.
        return _Linear.apply(x_NI, weight_OI, bias_O, matmul_mode, True, layout)
    weight_OI = dequantized(weight_OI, layout, x_NI.dtype)
    if x_NI.dtype == torch.float32:
        return nn.functional.linear(x_NI, weight_OI, bias_O)
    if not torch.is_grad_enabled():
        return multiply(x_NI, weight_OI, bias_O, matmul_mode=matmul_mode)
    if multiplies_in_float32(x_NI, matmul_mode):
        return _Linear.apply(x_NI, weight_OI, bias_O, matmul_mode, True, None)
    return nn.functional.linear(x_NI, weight_OI, bias_O)


def linear_graph(
    x_NI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None = None,
    *,
    matmul_mode: MatmulMode,
    layout: PackedLayout | None = None,
) -> Tensor:
    """Record ``linear`` for its backward pass only, without computing it; all values are NaN.

    For recomputation, if no backward reads the output.
    """
    return _Linear.apply(x_NI, weight_OI, bias_O, matmul_mode, False, layout)


def add_product(
    out_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, *, matmul_mode: MatmulMode, only_graph: bool = False
) -> Tensor:
    """Return out + x · weightᵀ in out's memory, which no backward may read; with ``only_graph`` as NaN."""
    # In a graph the compiler decides on memory.
    if torch.compiler.is_compiling():
        if only_graph:
            return out_NO + linear_graph(x_NI, weight_OI, matmul_mode=matmul_mode)
        return out_NO + linear(x_NI, weight_OI, matmul_mode=matmul_mode)
    if torch.is_grad_enabled():
        return _AddProduct.apply(out_NO, x_NI, weight_OI, matmul_mode, only_graph)
    return add_product_(out_NO, x_NI, weight_OI, matmul_mode)


def add_product_(out_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, matmul_mode: MatmulMode) -> Tensor:
    """Add x · weightᵀ to out, without a gradient."""
    if multiplies_in_float32(x_NI, matmul_mode) or not out_NO.is_contiguous():
        return out_NO.add_(multiply(x_NI, weight_OI, matmul_mode=matmul_mode))
    out_NO.view(-1, out_NO.shape[-1]).addmm_(x_NI.reshape(-1, x_NI.shape[-1]), weight_OI.T)
    return out_NO


def no_values(x_NI: Tensor, weight_OI: Tensor, layout: PackedLayout | None = None) -> Tensor:
    """Return NaN in the shape of x · weightᵀ, without allocating it, so that any use is noticed."""
    width = weight_OI.shape[:1]
    if layout is not None:
        width = torch.Size(layout.shape[:1])
    return nan_of_shape(x_NI, x_NI.shape[:-1] + width)


def nan_of_shape(like: Tensor, shape: Sequence[int]) -> Tensor:
    """Return an expanded NaN scalar in this shape, with ``like``'s dtype and device, for values that are never read."""
    return like.new_full((), torch.nan).expand(tuple(shape))


def multiply(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None, *, matmul_mode: MatmulMode) -> Tensor:
    """Compute ``linear`` without a gradient, for an ``autograd.Function``'s forward pass."""
    if x_NI.dtype == torch.float32:
        return nn.functional.linear(x_NI, weight_OI, bias_O)
    if is_one_row(x_NI) and is_vector_product(x_NI, matmul_mode):
        # reads every weight once, without conversion, and sums in float32
        if bias_O is None:
            out_O = torch.mv(weight_OI, x_NI.reshape(-1))
        else:
            out_O = torch.addmv(bias_O, weight_OI, x_NI.reshape(-1))
        return out_O.view(x_NI.shape[:-1] + out_O.shape)
    if not multiplies_in_float32(x_NI, matmul_mode):
        return nn.functional.linear(x_NI, weight_OI, bias_O)
    # a graph that unrolled the tiles would only serve one row count
    if torch.compiler.is_compiling():
        return torch.ops.longctx.multiply.default(x_NI, weight_OI, bias_O)
    return _multiply(x_NI, weight_OI, bias_O)


def _multiply(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, computed in float32 and rounded once."""
    rows_NI, weight_IO = x_NI.reshape(-1, x_NI.shape[-1]), weight_OI.float().T
    # In its final shape: autograd forbids in-place sums with a function's result if it is a view.
    out_NO = rows_NI.new_empty(x_NI.shape[:-1] + weight_OI.shape[:1])
    rows_NO = out_NO.view(-1, weight_OI.shape[0])
    for n in row_tiles(len(rows_NI), _ROWS):
        product = rows_NI[n].float() @ weight_IO
        # still in float32, so that the result is rounded once
        if bias_O is not None:
            product.add_(bias_O.float())
        rows_NO[n] = product
    return out_NO


def _linear_in_new_memory(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute PyTorch's ``linear`` for an ``autograd.Function``'s forward pass: a result that is no view."""
    # PyTorch's own result is a view of a matrix (see ``_multiply``).
    if torch.compiler.is_compiling():
        return nn.functional.linear(x_NI, weight_OI, bias_O)
    out_NO = x_NI.new_empty(x_NI.shape[:-1] + weight_OI.shape[:1])
    rows_NI, rows_NO = x_NI.reshape(-1, x_NI.shape[-1]), out_NO.view(-1, weight_OI.shape[0])
    if bias_O is None:
        torch.mm(rows_NI, weight_OI.T, out=rows_NO)
    else:
        torch.addmm(bias_O, rows_NI, weight_OI.T, out=rows_NO)
    return out_NO


def is_one_row(x_NI: Tensor) -> bool:
    """Return whether x is a single row on the CPU, as in decoding."""
    return on_cpu(x_NI) and x_NI.numel() == x_NI.shape[-1]


def is_vector_product(x: Tensor, matmul_mode: MatmulMode) -> bool:
    """Return whether a single row uses a matrix-vector product instead of a one-row matmul."""
    return x.dtype != torch.bfloat16 or matmul_mode == "float32" or multiplies_rows_as_vectors()


def multiply_backward(
    dy_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, *, needs_x: bool, needs_weight: bool, matmul_mode: MatmulMode
) -> tuple[Tensor | None, Tensor | None]:
    """Return ``multiply``'s gradients for x and the weight, each in its dtype, if needed."""
    if multiplies_in_float32(x_NI, matmul_mode):
        backward = _multiply_backward
        if torch.compiler.is_compiling():
            backward = torch.ops.longctx.multiply_backward.default
        # operators can only return tensors: an empty one stands for no gradient
        grads = zip(backward(dy_NO, x_NI, weight_OI, needs_x, needs_weight), (needs_x, needs_weight), strict=True)
        dx_NI, dweight_OI = (grad if is_needed else None for grad, is_needed in grads)
        return dx_NI, dweight_OI
    rows_NI, dy_rows_NO = x_NI.reshape(-1, x_NI.shape[-1]), dy_NO.reshape(-1, dy_NO.shape[-1])
    dx_NI = dweight_OI = None
    if needs_x:
        dx_NI = (dy_rows_NO @ weight_OI).view(x_NI.shape)
    if needs_weight:
        dweight_OI = dy_rows_NO.T @ rows_NI
    return dx_NI, dweight_OI


def _multiply_backward(
    dy_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    """Compute ``multiply_backward`` in float32; return an empty tensor for a gradient that is not needed."""
    rows_NI, dy_rows_NO = x_NI.reshape(-1, x_NI.shape[-1]), dy_NO.reshape(-1, dy_NO.shape[-1])
    dx_NI = dweight_OI = x_NI.new_empty(0)
    upcast_weight_OI = weight_OI
    if needs_x:
        upcast_weight_OI, dx_NI = weight_OI.float(), torch.empty_like(rows_NI)
    if needs_weight:
        # accumulated over tiles in float32 and rounded once
        dweight_OI = rows_NI.new_zeros(weight_OI.shape, dtype=torch.float32)
    for n in row_tiles(len(rows_NI), _ROWS):
        dy_nO = dy_rows_NO[n].float()
        if needs_x:
            dx_NI[n] = dy_nO @ upcast_weight_OI
        if needs_weight:
            dweight_OI.addmm_(dy_nO.T, rows_NI[n].float())
    if needs_x:
        dx_NI = dx_NI.view(x_NI.shape)
    return dx_NI, dweight_OI.to(weight_OI.dtype)


def sum_rows(dy_NO: Tensor) -> Tensor:
    """Return a bias gradient."""
    # one term per token: in bfloat16 a sum stops growing at 256 times its terms
    return dy_NO.flatten(0, -2).sum(0, dtype=accumulate_dtype(dy_NO.dtype)).to(dy_NO.dtype)


def add_upcast_matmul_(total_OI: Tensor, a_ON: Tensor, b_NI: Tensor) -> None:
    """Add a · b to a total with a wider dtype than its factors.

    On CUDA it is one matmul without rounding or temporary memory; other devices convert the factors.
    """
    # an operator, because PyTorch 2.11 traces its own ``addmm`` without the result's dtype
    torch.ops.longctx.add_upcast_matmul_.default(total_OI, a_ON, b_NI)


def _add_upcast_matmul_(total_OI: Tensor, a_ON: Tensor, b_NI: Tensor) -> None:
    total_OI.addmm_(a_ON.to(total_OI.dtype), b_NI.to(total_OI.dtype))


def add_upcast_matmul_on_cuda_(total_OI: Tensor, a_ON: Tensor, b_NI: Tensor) -> None:
    """Compute ``add_upcast_matmul_`` with CUDA's addmm, the only one that takes factors narrower than its result."""
    torch.addmm(total_OI, a_ON, b_NI, out_dtype=total_OI.dtype, out=total_OI)


class _Linear(torch.autograd.Function):
    """Autograd function for ``linear``: with ``multiply``, or without values for its backward only."""

    # Saves the parameter itself, not a copy: ZeRO-3 frees a gathered weight by emptying the parameter.
    @staticmethod
    def forward(
        ctx: Any,
        x_NI: Tensor,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        matmul_mode: MatmulMode,
        has_values: bool,
        layout: PackedLayout | None,
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.products, ctx.layout = matmul_mode, layout
        if not has_values:
            return no_values(x_NI, weight_OI, layout)
        weight_OI = dequantized(weight_OI, layout, x_NI.dtype)
        if multiplies_in_float32(x_NI, matmul_mode):
            return multiply(x_NI, weight_OI, bias_O, matmul_mode=matmul_mode)
        return _linear_in_new_memory(x_NI, weight_OI, bias_O)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        x, weight = ctx.saved_tensors
        matmul_mode = ctx.products
        weight = dequantized(weight, ctx.layout, x.dtype)
        dx, dweight = multiply_backward(
            dy, x, weight, needs_x=needs_x, needs_weight=needs_weight, matmul_mode=matmul_mode
        )
        dbias: Tensor | None = None
        if needs_bias:
            dbias = sum_rows(dy)
        return dx, dweight, dbias, None, None, None


class _AddProduct(torch.autograd.Function):
    """Autograd function for ``add_product``: the sum's gradient is the output's, without a copy."""

    @staticmethod
    def forward(
        ctx: Any, out_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, matmul_mode: MatmulMode, only_graph: bool
    ) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        ctx.products = matmul_mode
        if only_graph:
            return no_values(x_NI, weight_OI)
        ctx.mark_dirty(out_NO)
        return add_product_(out_NO, x_NI, weight_OI, matmul_mode)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        needs_out, needs_x, needs_weight = ctx.needs_input_grad[:3]
        x, weight = ctx.saved_tensors
        dx, dweight = multiply_backward(
            dy, x, weight, needs_x=needs_x, needs_weight=needs_weight, matmul_mode=ctx.products
        )
        return dy if needs_out else None, dx, dweight, None, None


def row_tiles(rows: int, size: int) -> Iterator[slice]:
    """Split the rows into tiles with at most ``size`` rows."""
    return (slice(start, min(start + size, rows)) for start in range(0, rows, size))


def _fake_multiply(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    return x_NI.new_empty(x_NI.shape[:-1] + weight_OI.shape[:1])


def _fake_multiply_backward(
    dy_NO: Tensor, x_NI: Tensor, weight_OI: Tensor, needs_x: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    dx_NI = dweight_OI = x_NI.new_empty(0)
    if needs_x:
        dx_NI = x_NI.new_empty(x_NI.shape)
    if needs_weight:
        dweight_OI = weight_OI.new_empty(weight_OI.shape)
    return dx_NI, dweight_OI


_library = torch.library.Library("longctx", "FRAGMENT")
_library.define("multiply(Tensor x, Tensor weight, Tensor? bias) -> Tensor")
_library.define(
    "multiply_backward(Tensor dy, Tensor x, Tensor weight, bool needs_x, bool needs_weight) -> (Tensor, Tensor)"
)
for _name, _operator, _fake in (
    ("multiply", _multiply, _fake_multiply),
    ("multiply_backward", _multiply_backward, _fake_multiply_backward),
):
    _library.impl(_name, _operator, "CompositeExplicitAutograd")
    torch.library.register_fake(f"longctx::{_name}", _fake, lib=_library)
_library.define("add_upcast_matmul_(Tensor(a!) total, Tensor a, Tensor b) -> ()")
_library.impl("add_upcast_matmul_", _add_upcast_matmul_, "CompositeExplicitAutograd")
_library.impl("add_upcast_matmul_", add_upcast_matmul_on_cuda_, "CUDA")
torch.library.register_fake("longctx::add_upcast_matmul_", lambda *_: None, lib=_library)
