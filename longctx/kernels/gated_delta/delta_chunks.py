"""Gated delta rule within a chunk, as matmuls (arXiv 2412.06464 §3.3, 2510.26692 §3).

Axes: N chunks, B batch, K key heads, G value heads of a key head, C tokens of a chunk, D key head size, V value head
size, X = D if decays differ by channel, else 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longctx.kernels.gated_delta.chunk_spans import ChunkBlock
from longctx.kernels.gated_delta.front import ProjectedTokens

L2_EPS = 1e-6
"""Added to a query's or key's sum of squares, as in the published models."""

_LEAF = 8
"""Side length of squares whose pairs are multiplied one by one if decays differ by channel."""


class Chunked(NamedTuple):
    """Factors applied to the states that enter chunks."""

    u_NBKGCV: Tensor
    """Values the tokens write for an incoming state of 0."""
    w_NBKGCD: Tensor
    """Reads from the incoming state to correct them."""
    q_NBKGCD: Tensor
    """Queries into the incoming state."""
    k_NBKGCD: Tensor
    """Keys into the outgoing state."""
    p_NBKGCC: Tensor
    """Weights from the chunk's queries to its own written values."""
    total_NBKGX1: Tensor
    """State decay over the chunk."""


# Let g_i be the log decays of a chunk's tokens, c_i = g_0 + … + g_i, D(a, b)_ij = Σ_d a_id b_jd exp(g_j+1,d + … + g_id)
# for j ≤ i their decayed scores, and T = (I + β_i·D(k, k)_ij for j < i)⁻¹. Then the chunk writes the values T·(β v) −
# T·(β k exp(c))·S, where S is the incoming state. Everything independent from S is computed here for many chunks at
# once; ``rule`` then passes S through sequentially.
#
# Mamba-2 (arXiv 2405.21060) has no inverse: a chunk writes β v, nothing is subtracted, and queries and keys are not
# normalized. There β multiplies the keys instead of the values, so that the skip is a number on the diagonal.
#
# Invariant: no exponent is positive, and none is a difference between two sums. So after a token that forgets
# everything (g = -50) the decays of its successors keep full precision.
def chunk_factors(tokens: ProjectedTokens, block: ChunkBlock, chunk: int, skip_KG: Tensor | None = None) -> Chunked:
    """Compute the chunk factors for a chunk block's activated tokens (a and b are g and β); differentiable.

    With ``skip_KG``, compute Mamba-2's factors.
    """
    q, k = (fold(x.unsqueeze(3), block, chunk) for x in (tokens.q_BtKD, tokens.k_BtKD))
    if skip_KG is None:
        # unit-length keys make I − β k kᵀ a contraction for β up to 2
        q, k = _normalized(q) * q.shape[-1] ** -0.5, _normalized(k)
    v, decay = (fold(x, block, chunk) for x in (tokens.v_BtKGV, tokens.a_BtKGX))
    beta = fold(tokens.b_BtKG.unsqueeze(-1), block, chunk)
    lower = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).tril()
    if block.masks is not None:
        lower = (lower & block.masks.same_NCC)[:, None, None, None]
    kk, qk = _decayed_scores(k, q, decay, lower)
    decay_from_start, decay_to_end, total = (
        decay.cumsum(-2).exp(),
        _sums_after(decay).exp(),
        decay.sum(-2, keepdim=True).mT.exp(),
    )
    # tokens in other segments neither read the incoming state nor write to the outgoing one
    if block.masks is not None:
        decay_from_start = decay_from_start * block.masks.enter_NC[:, None, None, None, :, None]
        decay_to_end = decay_to_end * block.masks.leave_NC[:, None, None, None, :, None]
        total = total * block.masks.pass_N[:, None, None, None, None, None]
    identity = torch.eye(chunk, dtype=q.dtype, device=q.device)
    if skip_KG is not None:
        own = qk * beta.mT + identity * skip_KG.to(q.dtype)[..., None, None]
        keys = beta * k
        return Chunked(v, torch.zeros_like(keys), q * decay_from_start, keys * decay_to_end, own, total)
    system = (beta * kk).tril(-1)
    # Explicit inverse: forward multiplies it with two factors, and backward needs it transposed.
    inverse = torch.linalg.solve_triangular(system, identity.expand_as(system), upper=False, unitriangular=True)
    return Chunked(
        inverse @ (beta * v), inverse @ (beta * decay_from_start * k), q * decay_from_start, k * decay_to_end, qk, total
    )


def fold(x_BtKGX: Tensor, block: ChunkBlock, chunk: int) -> Tensor:
    """Cut a block's rows into chunks, [N, B, K, G, C, X]; missing rows are 0."""
    missing = block.num_chunks * chunk - x_BtKGX.shape[1]
    if missing:
        x_BtKGX = functional.pad(x_BtKGX, (0, 0) * 3 + (0, missing))
    return x_BtKGX.unflatten(1, (block.num_chunks, chunk)).permute(1, 0, 3, 4, 2, 5)


def unfold(x_NBKGCX: Tensor, rows: int) -> Tensor:
    """Return the chunks' first ``rows`` tokens, [B, t, K, G, X]."""
    return x_NBKGCX.permute(1, 0, 4, 2, 3, 5).flatten(1, 2)[:, :rows]


def _normalized(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + L2_EPS).rsqrt()


def _sums_after(decay: Tensor) -> Tensor:
    """Return the summed log decays of later tokens (dim -2), 0 for the last."""
    return functional.pad(decay[..., 1:, :].flip(-2), (0, 0, 1, 0)).cumsum(-2).flip(-2)


def _sums_between(decay: Tensor) -> Tensor:
    """Return g_j+1 + … + g_i as entry [i, j] in dims -3 and -2 for j ≤ i, -inf for others."""
    size = decay.shape[-2]
    upper = torch.ones(size, size, dtype=torch.bool, device=decay.device).triu()
    sums = decay.unsqueeze(-2).masked_fill(upper.unsqueeze(-1), 0.0).cumsum(-3)
    return sums.masked_fill(upper.triu(1).unsqueeze(-1), -torch.inf)


def _decayed_scores(k: Tensor, q: Tensor, decay: Tensor, lower: Tensor) -> tuple[Tensor, Tensor]:
    """Return D(k, k) and D(q, k) [N, B, K, G, C, C], masked to 0 if ``lower`` is False."""
    if decay.shape[-1] == 1:
        factors = _sums_between(decay).squeeze(-1).masked_fill(~lower, -torch.inf).exp()
        return k @ k.mT * factors, q @ k.mT * factors
    # stack k and q rows, because both multiply the same keys
    kk, qk = _by_channel(torch.stack((k, q)), k, decay).masked_fill(~lower, 0.0)
    return kk, qk


def _by_channel(a: Tensor, b: Tensor, decay: Tensor) -> Tensor:
    """Return D(a, b) with per-channel decays, by recursive halving."""
    # A square's lower left quarter is one matmul: relative to the end of the first half, later rows decay since then
    # and earlier rows until then. The two diagonal squares are halved again, down to leaves, whose pairs are multiplied
    # channel by channel.
    size = leaf = b.shape[-2]
    while leaf > _LEAF and leaf % 2 == 0:
        leaf //= 2
    a_leaves, b_leaves, decay_leaves = (x.unflatten(-2, (-1, leaf)) for x in (a, b, decay))
    factors = _sums_between(decay_leaves).exp()
    # the only per-channel multiplications: C/8 squares with 8 tokens each, not one with C
    squares = torch.einsum("s...id,...jd,...ijd->s...ij", a_leaves, b_leaves, factors)
    while leaf < size:
        a_halves, b_halves, decay_halves = (x.unflatten(-2, (-1, 2, leaf)) for x in (a, b, decay))
        second_half = a_halves[..., 1, :, :] * decay_halves[..., 1, :, :].cumsum(-2).exp()
        first_half = b_halves[..., 0, :, :] * _sums_after(decay_halves[..., 0, :, :]).exp()
        lower_left = second_half @ first_half.mT
        upper_left, lower_right = squares.unflatten(-3, (-1, 2)).unbind(-3)
        above = torch.cat((upper_left, torch.zeros_like(lower_left)), -1)
        squares = torch.cat((above, torch.cat((lower_left, lower_right), -1)), -2)
        leaf *= 2
    return squares.squeeze(-3)
