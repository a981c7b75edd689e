"""``as_bytes``: a tensor's memory, for code that sends, stores or compares bits in any dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def as_bytes(x: Tensor) -> Tensor:
    """View a contiguous tensor's memory as uint8 [bytes]."""
    assert x.is_contiguous(), "the tensor must be contiguous"
    # ``x.view(torch.uint8)`` requires a last stride of 1, but an empty or single-value tensor may have any stride.
    return x.detach().as_strided((x.numel(),), (1,)).view(torch.uint8)


def rows_as_bytes(x: Tensor) -> Tensor:
    """View a tensor [..., X] as uint8 [..., X · itemsize]; copied unless contiguous."""
    return as_bytes(x.contiguous()).view(x.shape[:-1] + torch.Size([x.shape[-1] * x.itemsize]))


def content_of(tensor: Tensor) -> memoryview:
    """Expose a CPU tensor's bytes to Python; copied unless contiguous."""
    return as_bytes(tensor.contiguous()).numpy().data
