"""The dtype that partial results are kept in."""

from __future__ import annotations

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results for inputs of ``dtype``."""
    if dtype == torch.float64:
        return torch.float64
    return torch.float32
