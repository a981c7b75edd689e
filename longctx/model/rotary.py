"""Rotary positions: the table of a batch's angles, and the rotation. Also sinusoids, which are added instead.

Positions are inputs, never counted here: a rank holds any part of a sequence, and documents restart at 0.

Axes: B rows, t tokens of this rank, H heads, D head size, C channel pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.architecture.rope import Rope
from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.matmul import nan_of_shape

_FEW_TOKENS = 32
"""Token limit for rotating queries and keys together."""


class RotaryTable(NamedTuple):
    """Cosines and sines that rotate queries and keys."""

    cos: Tensor
    """For this rank's positions, [B, t, 1, C]."""
    sin: Tensor
    doubled: tuple[Tensor, Tensor] | None = None
    """For few tokens and fully rotary heads: cosines twice, and −sines before sines, [B, t, 1, 2C]."""
    of_queries: tuple[Tensor, Tensor] | None = None
    """Cosines and sines for queries that grow with position; None if queries use the keys'."""

    def of_tokens(self, tokens: slice) -> RotaryTable:
        """Return the table for some tokens."""
        of_queries = None
        if self.of_queries is not None:
            cos, sin = self.of_queries
            of_queries = cos[:, tokens], sin[:, tokens]
        return RotaryTable(self.cos[:, tokens], self.sin[:, tokens], of_queries=of_queries)

    def tensors(self) -> list[Tensor]:
        """Return the tensors that backward reads."""
        return [self.cos, self.sin, *(self.of_queries or ())]

    @classmethod
    def build(
        cls, positions_Bt: Tensor, rope: Rope, rotary_size: int, dtype: torch.dtype, *, length: int, is_whole: bool
    ) -> RotaryTable:
        """Build the table for these positions (``rotary_table``); ``is_whole`` if all head channels rotate."""
        if rope.query_growth:
            cos, sin = rotary_table(positions_Bt, rope, rotary_size, dtype, length=length)
            # A factor on the full query is a factor on its rotation, if all channels rotate.
            growth = query_growth(positions_Bt, rope).to(cos.dtype)
            return cls(cos, sin, of_queries=(cos * growth, sin * growth))
        if torch.is_grad_enabled() or positions_Bt.numel() > _FEW_TOKENS or not is_whole:
            return cls(*rotary_table(positions_Bt, rope, rotary_size, dtype, length=length))
        # Both halves at once: a cosine is even and a sine is odd.
        angles = positions_Bt[..., None, None] * _signed_frequencies(rope, rotary_size, length, positions_Bt.device)
        cos, sin = angles.cos(), angles.sin()
        if rope.scale() != 1:
            cos, sin = cos * rope.scale(), sin * rope.scale()
        cos, sin = cos.to(accumulate_dtype(dtype)), sin.to(accumulate_dtype(dtype))
        pairs = rotary_size // 2
        return cls(cos[..., pairs:], sin[..., pairs:], (cos, sin))


def rotary_table(
    positions_Bt: Tensor, rope: Rope, rotary_size: int, dtype: torch.dtype, *, length: int = 0
) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [B, t, 1, rotary_size/2] for every token, in float32 (float64 for float64).

    ``length`` is the longest full document's; only ropes that stretch with it read it.
    """
    cos, sin = angles_of(positions_Bt, rope.frequencies(rotary_size, length))
    # The table includes YaRN's score scale, so kernels need not apply it.
    scale, partial = rope.scale(), accumulate_dtype(dtype)
    return (cos * scale).to(partial).unsqueeze(-2), (sin * scale).to(partial).unsqueeze(-2)


def query_growth(positions_Bt: Tensor, rope: Rope) -> Tensor:
    """Compute query factors [B, t, 1, 1], 1 within the length that the frequencies were trained for."""
    passed_Bt = positions_Bt.div(rope.original_max_positions, rounding_mode="floor").double()
    return (1 + rope.query_growth * torch.log1p(passed_Bt))[..., None, None]


# RoPE (Su et al., arXiv 2104.09864): position p rotates channel pair c by p · frequency_c, so q·k depends on the
# distance between two tokens only.
def apply_rotary(
    x_BtHD: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, only_graph: bool = False
) -> Tensor:
    """Rotate the first 2·C channels by the table's angles, in the table's dtype; return the result in x's.

    Channel c rotates with channel c + C, or if ``interleaved`` channel 2c with 2c + 1. With ``only_graph`` no value is
    computed and the result is NaN: for a recomputation, if backward reads no rotated value.
    """
    if not torch.is_grad_enabled():
        return _rotate(x_BtHD, cos, sin, interleaved)
    return _Rotary.apply(x_BtHD, cos, sin, interleaved, only_graph)


def apply_rotary_to_both(
    q_BtHD: Tensor, k_BtKD: Tensor, table: RotaryTable, *, interleaved: bool = False, only_graph: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply ``apply_rotary`` to queries and keys, with the same bits."""
    if table.doubled is None or interleaved or q_BtHD.dtype != table.cos.dtype:
        cos, sin = table.of_queries or (table.cos, table.sin)
        q = apply_rotary(q_BtHD, cos, sin, interleaved=interleaved, only_graph=only_graph)
        return q, apply_rotary(k_BtKD, table.cos, table.sin, interleaved=interleaved, only_graph=only_graph)
    # Rotate both in one operation, with both halves at once: for few tokens the operator count matters.
    x, (cos, sin) = torch.cat((q_BtHD, k_BtKD), dim=-2), table.doubled
    swapped = x.roll(table.cos.shape[-1], -1).mul_(sin)
    x, num_heads = x.mul_(cos).add_(swapped), q_BtHD.shape[-2]
    return x[..., :num_heads, :], x[..., num_heads:, :]


@lru_cache(maxsize=64)
@torch.inference_mode(False)  # training may read frequencies that generation cached
def _signed_frequencies(rope: Rope, rotary_size: int, length: int, device: torch.device) -> Tensor:
    """Return frequencies [2C] for both channel halves, negative in the first half."""
    # Built on the CPU and copied asynchronously: building from a list on a device waits for the copy.
    frequencies = torch.tensor(rope.frequencies(rotary_size, length), dtype=torch.float64)
    return torch.cat((-frequencies, frequencies)).to(device, non_blocking=True)


def angles_of(positions_Bt: Tensor, frequencies: Sequence[float]) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [B, t, C] for position · frequency, in float64."""
    # At a million tokens float32 angles would already be wrong by 0.03 radians.
    radians = torch.tensor(frequencies, dtype=torch.float64).to(positions_Bt.device, non_blocking=True)
    angles = positions_Bt.double().unsqueeze(-1) * radians
    return angles.cos(), angles.sin()


def sinusoid_table(positions_Bt: Tensor, size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines [B, t, size/2] for wavelengths from 2π to 10,000 · 2π (arXiv 1706.03762 §3.5)."""
    partial = accumulate_dtype(dtype)
    cos, sin = angles_of(positions_Bt, [10_000.0 ** (-2 * c / size) for c in range(size // 2)])
    return cos.to(partial), sin.to(partial)


def sinusoidal_embedding(positions_Bt: Tensor, size: int, dtype: torch.dtype, *, halves: bool = False) -> Tensor:
    """Build [B, t, size]: sines on even channels, cosines on odd; with ``halves`` all sines before all cosines."""
    cos, sin = sinusoid_table(positions_Bt, size, dtype)
    if halves:
        # Marian's order; a model trained in one cannot read the other.
        return torch.cat((sin, cos), dim=-1)
    return torch.stack((sin, cos), dim=-1).flatten(-2)


class _Rotary(torch.autograd.Function):
    """Autograd function that saves only the table: the gradient is the inverse rotation, which does not need x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, only_graph: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        if only_graph:
            return nan_of_shape(x, x.shape)
        return _rotate(x, cos, sin, interleaved)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor):  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        # A rotation's transpose is the rotation by the opposite angle.
        return _rotate(dy, cos, -sin, ctx.interleaved), None, None, None, None


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    pairs = cos.shape[-1]
    # Written directly into one result: pairs are not concatenated, and channels without positions are copied once.
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    # Converted once: multiplying two dtypes would convert the input each time.
    first, second = (half.to(cos.dtype) for half in _halves(x, pairs, interleaved))
    out_first, out_second = _halves(out, pairs, interleaved)
    out_first.copy_((first * cos).sub_(second * sin))
    out_second.copy_((second * cos).add_(first * sin))
    if 2 * pairs < x.shape[-1]:
        out[..., 2 * pairs :] = x[..., 2 * pairs :]
    return out


def _halves(x: Tensor, pairs: int, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0 : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]
    return x[..., :pairs], x[..., pairs : 2 * pairs]
