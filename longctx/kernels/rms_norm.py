"""RMSNorm that saves only its input and one number per row for backward.

Without a fused kernel, PyTorch's RMSNorm saves three float32 copies of its input: in a layer of width M, half of all
saved activations. On CUDA it has a fused kernel.

Axes: N rows (any leading shape), M normalized width.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from longctx.kernels.devices import on_cpu
from longctx.kernels.dtypes import accumulate_dtype, as_dtype

_FEW_VALUES = 1 << 14
"""Maximum size for PyTorch's operator: bitwise equal, faster, but needs more memory."""
_FEW_ROWS = 32
"""Maximum rows that generation normalizes with the fewest operations, which round in another order."""


def rms_norm(x_NM: Tensor, weight_M: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last axis, or · (1 + weight) with ``offset``.

    Computed in float32 (float64 for float64), in which 1 + weight keeps the learned digits, and rounded once to x's
    dtype.
    """
    if _has_fused_kernel(x_NM, weight_M, offset):
        return functional.rms_norm(x_NM, weight_M.shape, weight_M, eps)
    # the paths below would specialize a graph on the token count
    if not torch.is_grad_enabled() and not torch.compiler.is_compiling():
        is_plain = x_NM.dtype == weight_M.dtype == torch.float32 and not offset
        # In generation only: likelihoods and validation losses are compared bit by bit, so they keep their order of
        # rounding.
        if is_plain and torch.is_inference_mode_enabled() and x_NM.numel() <= _FEW_ROWS * x_NM.shape[-1]:
            return _normalize_few(x_NM, weight_M, eps)
        if is_plain and x_NM.numel() <= _FEW_VALUES:
            return functional.rms_norm(x_NM, weight_M.shape, weight_M, eps)
        return _normalize(x_NM, weight_M, eps, offset)[0]
    return _RMSNorm.apply(x_NM, weight_M, eps, offset)


def _has_fused_kernel(x: Tensor, weight: Tensor, offset: bool) -> bool:
    """Return whether one PyTorch kernel saves and rounds the same values as ``_RMSNorm``."""
    # A compiled graph fuses the definition with its surroundings. 1 + weight needs a dtype that the kernel rejects.
    return not on_cpu(x) and x.dtype == weight.dtype and not offset and not torch.compiler.is_compiling()


def _normalize(x: Tensor, weight: Tensor, eps: float, offset: bool) -> tuple[Tensor, Tensor]:
    """Return the result in x's dtype, and each row's 1 / sqrt(mean(x²) + eps)."""
    # float32: in bfloat16, a mean over thousands of squares would lose the small ones
    partial = accumulate_dtype(x.dtype)
    upcast = x.to(partial)
    rstd_N1 = torch.linalg.vecdot(upcast, upcast).div_(x.shape[-1]).add_(eps).rsqrt_().unsqueeze(-1)
    out, factor = _times(upcast, rstd_N1, upcast is not x), _factor(weight, offset, partial)
    # PyTorch 2.11's compiler loses the gradient for a result that has a second name, as ``mul_`` and ``to`` with the
    # same dtype return it (its issue 180642). In compiled code an in-place multiplication gains no time.
    if torch.compiler.is_compiling():
        out = out * factor
    else:
        out.mul_(factor)
    return as_dtype(out, x.dtype), rstd_N1


def _normalize_few(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute the result for a few float32 rows, for which the operation count dominates."""
    norm_N1 = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    # a Python number would become a tensor in each call, which takes as long as the sum
    rstd_N1 = torch.addcmul(_scalar(eps, x.device), norm_N1, norm_N1, value=1 / x.shape[-1]).rsqrt_()
    return (x * rstd_N1).mul_(weight)


@lru_cache(maxsize=16)
def _scalar(value: float, device: torch.device) -> Tensor:
    return torch.tensor(value, device=device, dtype=torch.float32)


class _RMSNorm(torch.autograd.Function):
    """Autograd function that saves x as is and each row's 1 / sqrt(mean(x²) + eps)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float, offset: bool) -> Tensor:
        out, rstd_N1 = _normalize(x, weight, eps, offset)
        ctx.save_for_backward(x, weight, rstd_N1)
        ctx.offset = offset
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        x, weight, rstd_N1 = ctx.saved_tensors
        partial = accumulate_dtype(x.dtype)
        is_copied = x.dtype != partial
        normed, dy_upcast = _times(x.to(partial), rstd_N1, is_copied), dy.to(partial)
        dweight: Tensor | None = None
        if ctx.needs_input_grad[1]:
            dweight = (dy_upcast * normed).flatten(0, -2).sum(0).to(weight.dtype)
        # with n = x · rstd: dx = rstd · (dn − n · mean(dn · n)), the second term through rstd
        dnormed = _times(dy_upcast, _factor(weight, ctx.offset, partial), is_copied)
        mean_N1 = torch.linalg.vecdot(dnormed, normed).div_(x.shape[-1]).unsqueeze(-1)
        dx = dnormed.addcmul_(normed, mean_N1, value=-1).mul_(rstd_N1)
        return dx.to(x.dtype), dweight, None, None


def _times(upcast: Tensor, factor: Tensor, in_place: bool) -> Tensor:
    """Multiply, in place if ``upcast`` is a copy: new pages would take longer than the multiplication."""
    if in_place:
        return upcast.mul_(factor)
    return upcast * factor


def _factor(weight: Tensor, offset: bool, partial: torch.dtype) -> Tensor:
    factor = weight.to(partial)
    if offset:
        return factor + 1
    return factor
