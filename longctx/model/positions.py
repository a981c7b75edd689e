"""Positions that are added or looked up instead of rotated: sinusoids, and the rule of learned tables.

Axes: B rows, t tokens of this rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.devices import on_cpu
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.graphs import outside_graphs
from longctx.model.rotary import angles_of


def sinusoid_table(positions_Bt: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, t, size/2] of wavelengths from 2π to 10,000 · 2π (arXiv 1706.03762 §3.5)."""
    partial = accumulate_dtype(dtype)
    cos, sin = angles_of(positions_Bt, [10_000.0 ** (-2 * c / size) for c in range(size // 2)])
    return cos.to(partial), sin.to(partial)


def sinusoidal_embedding(positions_Bt: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """[B, t, size]: sines on even channels, cosines on odd ones."""
    cos, sin = sinusoid_table(positions_Bt, size, dtype)
    return torch.stack((sin, cos), dim=-1).flatten(-2)


@outside_graphs  # lengths are data: a graph that read them would serve one batch
def check_learned(positions_Bt: Tensor, longest: int, max_positions: int) -> None:
    """ConfigError where a learned table of ``max_positions`` rows has none for a token.

    ``longest`` is the length of the longest document, on whatever ranks it lies: every rank fails alike. Positions
    themselves are looked at on the CPU only: on another device it would wait for what was asked before.
    """
    needed = longest
    if positions_Bt.numel() and on_cpu(positions_Bt):
        needed = max(needed, int(positions_Bt.max()) + 1)
    if needed > max_positions:
        raise ConfigError(
            f"a document of {needed} tokens is longer than model.max_positions={max_positions}, the rows of the "
            f"learned position table (model.position='learned'). Cut documents to {max_positions} tokens "
            f"(data.seq_len={max_positions}), or train a table with model.max_positions={needed}."
        )
