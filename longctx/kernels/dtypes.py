"""The dtype for partial results, and conversions that are fast if there is little to convert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the partial result dtype for inputs in ``dtype``."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x to this dtype; return x itself if it already has it."""
    # ``to`` also checks, but takes as long as a small operation
    if x.dtype == dtype:
        return x
    return x.to(dtype)


def int64_tensor(numbers: Sequence[int]) -> Tensor:
    """Create an int64 CPU tensor from these numbers."""
    # for ten numbers, ``torch.tensor`` takes four times as long
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
