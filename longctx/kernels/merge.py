"""Merge softmax results over different keys: eager, and on CUDA in one kernel if Triton is installed.

Axes: V value head size; any leading axes.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Merge a softmax result over other keys into ``out`` [..., V] and ``lse`` [...], in place.

    Log-sum-exps are float64; a row without a key in one result takes the other's.
    """
    if out.is_cuda and has_triton() and are_contiguous(out, lse, block_out, block_lse):
        torch.ops.longctx.merge_.default(out, lse, block_out, block_lse)
    else:
        merge_eager_(out, lse, block_out, block_lse)


def merge_eager_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Compute ``merge_`` with PyTorch operators: five passes over the outputs instead of the kernel's three."""
    total = torch.logaddexp(lse, block_lse)
    # Each result is normalized over its own keys; over all keys its weight is exp(its lse − total), at most 1. A row
    # without any key would give −inf − (−inf): subtracting 0 instead yields weight exp(−inf). NaNs still propagate.
    origin = total.masked_fill(total == -torch.inf, 0.0)
    old_weight = torch.exp(lse - origin).to(out.dtype).unsqueeze(-1)
    new_weight = torch.exp(block_lse - origin).to(out.dtype).unsqueeze(-1)
    out.mul_(old_weight).addcmul_(block_out, new_weight)
    lse.copy_(total)


@cache
def has_triton() -> bool:
    """Return whether Triton is installed, as it is with PyTorch's CUDA builds."""
    return find_spec("triton") is not None


def are_contiguous(*tensors: Tensor) -> bool:
    """Return whether all tensors are contiguous, as the kernel requires."""
    return all(tensor.is_contiguous() for tensor in tensors)


def _merge_by_kernel(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    from longctx.kernels.merge_triton import launch_merge  # Triton takes a second to import, and CPU builds lack it

    launch_merge(out, lse, block_out, block_lse)


# an operator, so that tracing and fake tensors stay outside the kernel
_library = torch.library.Library("longctx", "FRAGMENT")
_library.define("merge_(Tensor(a!) out, Tensor(b!) lse, Tensor block_out, Tensor block_lse) -> ()")
_library.impl("merge_", merge_eager_, "CompositeExplicitAutograd")
_library.impl("merge_", _merge_by_kernel, "CUDA")
torch.library.register_fake("longctx::merge_", lambda *_: None, lib=_library)
