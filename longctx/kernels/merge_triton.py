# pyright: reportMissingImports=false, reportIndexIssue=false
# PyTorch builds for CPUs come without Triton, and a kernel is launched by an index that has no type.
"""Triton kernel for ``merge_``: reads both results once and writes one.

Axes: R rows (tokens × heads), V value head size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VALUES = 4096
"""Values per program: 16 KB from each output."""


@triton.jit
def merge_kernel(out, lse, block_out, block_lse, rows, V: tl.constexpr, V_PADDED: tl.constexpr, ROWS: tl.constexpr):
    """Merge ROWS rows from ``block_out`` [R, V] and ``block_lse`` [R] into ``out`` and ``lse``."""
    # 64 bits: a million tokens with 32 heads exceed 32-bit offsets
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    is_row = row < rows
    old = tl.load(lse + row, mask=is_row, other=float("-inf"))
    new = tl.load(block_lse + row, mask=is_row, other=float("-inf"))
    # subtract the larger one, so that no exponential exceeds 1; without any key it is −inf
    peak = tl.maximum(old, new)
    origin = tl.where(peak == float("-inf"), 0.0, peak)
    old_exp, new_exp = tl.exp(old - origin), tl.exp(new - origin)
    sum_exp = old_exp + new_exp
    divisor = tl.where(sum_exp == 0.0, 1.0, sum_exp)
    tl.store(lse + row, tl.where(sum_exp == 0.0, float("-inf"), origin + tl.log(divisor)), mask=is_row)

    old_weight = (old_exp / divisor).to(tl.float32)
    new_weight = (new_exp / divisor).to(tl.float32)
    channel = tl.arange(0, V_PADDED)
    at = row[:, None] * V + channel[None, :]
    is_value = is_row[:, None] & (channel < V)[None, :]
    kept = tl.load(out + at, mask=is_value, other=0.0).to(tl.float32)
    added = tl.load(block_out + at, mask=is_value, other=0.0).to(tl.float32)
    merged = kept * old_weight[:, None] + added * new_weight[:, None]
    tl.store(out + at, merged.to(out.dtype.element_ty), mask=is_value)


def launch_merge(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Run the kernel on contiguous tensors [..., V] and [...]; ``lse`` and ``block_lse`` may have different dtypes."""
    rows, V = lse.numel(), out.shape[-1]
    if rows == 0:
        return
    constants = constants_for(V)
    grid = (triton.cdiv(rows, constants["ROWS"]),)
    with torch.cuda.device_of(out):
        merge_kernel[grid](out, lse, block_out, block_lse, rows, **constants)


def constants_for(value_dim: int) -> dict[str, int]:
    """Return the compile-time constants other than dtypes."""
    padded = triton.next_power_of_2(value_dim)
    return {"V": value_dim, "V_PADDED": padded, "ROWS": max(1, _VALUES // padded)}
