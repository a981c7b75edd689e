"""RMSNorm and LayerNorm; statistics are float32 in any model dtype, and results are rounded once.

Axes: M normalized width; leading axes are any.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.config import ModelConfig
from longctx.kernels.rms_norm import rms_norm


def build_norm(config: ModelConfig, size: int) -> nn.Module:
    """Build the config's norm over ``size`` channels."""
    if config.norm == "layernorm":
        return LayerNorm(size, eps=config.norm_eps)
    return RMSNorm(size, eps=config.norm_eps, offset=config.norm_offset)


class RMSNorm(nn.Module):
    """x / sqrt(mean(x²) + eps) · weight over the last axis; with ``offset`` the factor is 1 + weight (Gemma)."""

    def __init__(self, size: int, *, eps: float, offset: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps, self.offset = eps, offset

    def forward(self, x_BtM: Tensor) -> Tensor:
        return rms_norm(x_BtM, self.weight, self.eps, offset=self.offset)


class LayerNorm(nn.LayerNorm):
    """(x − mean) / sqrt(variance + eps) · weight + bias over the last axis."""

    def __init__(self, size: int, *, eps: float) -> None:
        super().__init__(size, eps=eps)

    def reset_parameters(self) -> None:
        """Skip PyTorch's initialization: ``Decoder.initialize`` or a state dict fills the weights."""
