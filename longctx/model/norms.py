"""RMSNorm."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis; for bfloat16 input computed in float32 and rounded once."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps

    def forward(self, x_BtM: Tensor) -> Tensor:
        return nn.functional.rms_norm(x_BtM, self.weight.shape, self.weight, self.eps)
