"""Dropout as a function of a seed and of where a value stands: the same on any number of ranks, and when recomputed.

Axes: B rows, t tokens of this rank, M model width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


@dataclass(frozen=True, eq=False)
class Dropout:
    """What decides in one forward pass which values are dropped; nothing is drawn from a generator."""

    rate: float
    """Probability that a value is dropped; what stays is scaled up by 1 / (1 − rate)."""
    seed: int
    """Of this micro-batch."""
    token_Bt: Tensor
    """Each token's place in the whole micro-batch, on whatever rank."""

    def __call__(self, x_BtM: Tensor, site: int) -> Tensor:
        """x with values dropped; ``site`` tells apart the places of the network that drop."""
        key = hash_(torch.tensor([self.seed & _MASK, site & _MASK], dtype=torch.int64))
        start = int(hash_(key[0] ^ (key[1] + 0x9E3779B9 & _MASK)))
        token = hash_(self.token_Bt.to(torch.int64) + start & _MASK)
        channel = torch.arange(x_BtM.shape[-1], device=x_BtM.device, dtype=torch.int64) * 0x9E3779B1 & _MASK
        drawn = hash_(token.unsqueeze(-1) ^ channel)
        kept = drawn >= int(self.rate * 2**32)
        return x_BtM * kept.to(x_BtM.dtype).div_(1 - self.rate)


def hash_(x: Tensor) -> Tensor:
    """32 well mixed bits of each 32-bit value (the finaliser of MurmurHash3), as int64."""
    x = (x ^ x >> 16) * 0x85EBCA6B & _MASK
    x = (x ^ x >> 13) * 0xC2B2AE35 & _MASK
    return x ^ x >> 16
