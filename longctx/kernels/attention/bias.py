"""Score rules beyond the scaled dot product: soft cap, ALiBi, learned distance bias.

Axes: B batch, H query heads, R query rows and S keys of a tile, N buckets of a bias table, n distances of a tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from longctx.errors import ConfigError
from longctx.kernels.attention.kernel_interface import RelativeBias, ScoreRules
from longctx.kernels.attention.slices import AttentionSlice


def alibi_slopes(num_heads: int) -> Tensor:
    """Return ALiBi's float32 slopes [H]: 2^(−8h/H) for h = 1 … H, if H is a power of two.

    Other head counts take the slopes for the power of two below, then every second slope for the power above, as the
    paper's authors do (arXiv 2108.12409, footnote 6 and code).
    """
    below = 1 << num_heads.bit_length() - 1
    slopes = [2.0 ** (-8 * h / below) for h in range(1, below + 1)]
    slopes += [2.0 ** (-4 * h / below) for h in range(1, 2 * below, 2)]
    return torch.tensor(slopes[:num_heads], dtype=torch.float32)


def soft_cap(scores: Tensor, cap: float) -> Tensor:
    """Return cap·tanh(scores / cap)."""
    return torch.tanh(scores / cap) * cap


def check_scores(scores: ScoreRules, num_heads: int) -> None:
    """Raise ConfigError if a score rule is invalid or does not fit ``num_heads`` query heads."""
    if scores.softcap is not None and not scores.softcap > 0:
        raise ConfigError(f"softcap={scores.softcap} must be above 0; use None for no cap.")
    slopes, bias = scores.alibi_slopes_H, scores.relative_bias
    if slopes is not None and tuple(slopes.shape) != (num_heads,):
        raise ConfigError(
            f"ALiBi slopes have shape {tuple(slopes.shape)} for {num_heads} query heads; give one per head."
        )
    if bias is not None:
        if bias.table_NH.ndim != 2 or bias.table_NH.shape[1] != num_heads:
            shape = tuple(bias.table_NH.shape)
            raise ConfigError(
                f"the bias table has shape {shape} for {num_heads} query heads; expected [buckets, {num_heads}]."
            )
        _check_buckets(bias)


def _check_buckets(bias: RelativeBias) -> None:
    num, num_directions = bias.table_NH.shape[0], 1 + bias.bidirectional
    if num < 2 * num_directions or num % num_directions:
        rule = "at least 2"
        if bias.bidirectional:
            rule = "an even number, at least 4"
        raise ConfigError(f"the bias table has {num} buckets; it needs {rule}. T5 has 32.")
    if bias.max_distance <= num // num_directions // 2:
        raise ConfigError(
            f"relative bias: max_distance={bias.max_distance} must exceed {num // num_directions // 2}: shorter "
            f"distances have a bucket each with {num} buckets. T5 has 128."
        )


def buckets(relative_positions: Tensor, bias: RelativeBias) -> Tensor:
    """Map distances in tokens to bias table rows (int64); positive distances look back."""
    num = bias.table_NH.shape[0]
    # a bidirectional table's first half looks back, the second half ahead
    if bias.bidirectional:
        num //= 2
        first, size = num * (relative_positions < 0), relative_positions.abs()
    else:
        first, size = torch.zeros_like(relative_positions), relative_positions.clamp(min=0)
    exact = num // 2
    # float32, as in T5's code: if the logarithm is an integer, rounding decides the bucket
    ratio = torch.log(size.clamp(min=1).float() / exact) / math.log(bias.max_distance / exact)
    shared = (exact + (ratio * (num - exact)).long()).clamp(max=num - 1)
    return first + torch.where(size < exact, size, shared)


def distance_bias(scores: ScoreRules, relative_positions: Tensor) -> Tensor:
    """Return each head's bias, [H, *distances.shape] in float64; requires ``needs_relative_positions``."""
    total = torch.zeros((), dtype=torch.float64, device=relative_positions.device)
    along = (-1,) + (1,) * relative_positions.ndim  # heads first
    if scores.alibi_slopes_H is not None:
        total = (
            total
            - scores.alibi_slopes_H.to(relative_positions.device, torch.float64).view(along) * relative_positions.abs()
        )
    if scores.relative_bias is not None:
        bias = scores.relative_bias
        # float64 is cheap here: one bias serves a full diagonal of scores
        rows = bias.table_NH.double()[buckets(relative_positions, bias)]
        total = total + rows.movedim(-1, 0)
    return total


def tile_relative_positions(attn_slice: AttentionSlice, q: slice, k: slice, device: torch.device) -> Tensor:
    """Return the n = R + S − 1 distances in tokens within a tile, farthest back first."""
    q_minus_k_n = torch.arange(q.stop - 1 - k.start, q.start - k.stop, -1, device=device)
    return attn_slice.step * q_minus_k_n + attn_slice.offset


def expand_diagonals(values_Hn: Tensor, keys: int) -> Tensor:
    """Expand one value per distance to the tile's [H, R, S], as a view on its diagonals."""
    return values_Hn.unfold(-1, keys, 1).flip(-2)


def gather_diagonals(values_HRS: Tensor) -> Tensor:
    """Sum scores with equal distance into [H, n] in float64; the transpose of ``expand_diagonals``."""
    H, rows, keys = values_HRS.shape
    n = rows + keys - 1
    # Row i starts at column R − 1 − i, n − 1 elements after row i − 1, so equal distances share a column.
    shifted_HRn = values_HRS.new_zeros(H, rows, n)
    shifted_HRn.as_strided((H, rows, keys), (rows * n, n - 1, 1), rows - 1).copy_(values_HRS)
    return shifted_HRn.sum(1).double()


def table_gradient(dvalues_Hn: Tensor, relative_positions_n: Tensor, bias: RelativeBias) -> Tensor:
    """Return the table's gradient [N, H], given the gradient at ``distance_bias``."""
    # one-hot matmul, because atomic additions are not reproducible
    named_Nn = functional.one_hot(buckets(relative_positions_n, bias), bias.table_NH.shape[0]).T.to(dvalues_Hn.dtype)
    return named_Nn @ dvalues_Hn.T
