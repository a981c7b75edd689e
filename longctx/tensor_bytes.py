"""``as_bytes``: the memory of a tensor, for code that sends, stores or compares bits of any dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a contiguous tensor, uint8 [bytes], in the same memory."""
    assert x.is_contiguous(), "its values must lie end to end"
    # Not ``x.view(torch.uint8)``, which requires a last stride of 1: an empty tensor and a single value may have any.
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def rows_as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of a tensor [..., X] of any strides, uint8 [..., X · itemsize]; copied unless contiguous."""
    return as_bytes(x.contiguous()).view(x.shape[:-1] + torch.Size([x.shape[-1] * x.itemsize]))


def content_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a CPU tensor for Python; copied unless the tensor is contiguous."""
    return as_bytes(tensor.contiguous()).numpy().data
