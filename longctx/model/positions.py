"""Rotary positions in Hugging Face's half-split layout: channel c turns together with channel c + D/2.

Axes: B rows, t tokens of this rank, H heads, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.contract import accumulate_dtype


def rotary_table(positions_Bt: Tensor, head_dim: int, theta: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, t, 1, D/2] of the angle of every token and channel pair, in float32 (float64 for float64).

    Positions are given, never counted here: a rank holds any part of a sequence, and documents restart at 0. Angles
    are formed in float64, for at a million tokens float32 would already be wrong by 0.03 radians.
    """
    channels = torch.arange(0, head_dim, 2, device=positions_Bt.device, dtype=torch.float64)
    angles = positions_Bt.double()[:, :, None, None] * theta ** (-channels / head_dim)
    partial = accumulate_dtype(dtype)
    return angles.cos().to(partial), angles.sin().to(partial)


def apply_rotary(x_BtHD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x with every channel pair turned by its token's angle, computed in the table's dtype, returned in x's."""
    first, second = x_BtHD.to(cos.dtype).chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x_BtHD.dtype)
