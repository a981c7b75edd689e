"""The dtype that partial results are kept in."""

from __future__ import annotations

import torch


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32
