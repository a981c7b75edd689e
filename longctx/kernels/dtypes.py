"""The dtype of partial results, and conversions that are fast if there is little to convert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of partial results for inputs of ``dtype``."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x in this dtype; x itself if it has it already."""
    # ``to`` finds that out as well, in the time of a small operation.
    if x.dtype == dtype:
        return x
    return x.to(dtype)


def int64_tensor(numbers: Sequence[int]) -> Tensor:
    """Return these numbers as a tensor on the CPU."""
    # For ten numbers, ``torch.tensor`` takes four times as long.
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
