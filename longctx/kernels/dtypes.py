"""The dtype of partial results, and conversions that take as little time as there is to convert."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results for inputs of ``dtype``."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x in this dtype: itself where it has it."""
    # ``to`` finds that out as well, in the time of a small operation.
    if x.dtype == dtype:
        return x
    return x.to(dtype)


def int64_tensor(numbers: Sequence[int]) -> Tensor:
    """These numbers on the CPU."""
    # Of ten numbers, ``torch.tensor`` takes four times as long.
    return torch.from_numpy(np.array(numbers, dtype=np.int64))
