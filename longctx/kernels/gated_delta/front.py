"""Operations before the gated delta rule: a short convolution along each channel's tokens, and gates.

    x ← silu(Σ_r w_r x_{t−r})        g = −exp(A)·softplus(a + δ)        β = s·sigmoid(b)

for queries, keys and values x, with w, A and δ learned per head (by channel: δ per channel), and s = 2 if the step may
have negative eigenvalues (arXiv 2411.12537), else 1. The convolution only reads tokens from its own document. In
Mamba-2 it has a bias, and β = softplus(b + δ) with b = a.

Axes: B batch, t tokens of a chunk block, K key heads, G value heads of a key head, D key head size, V value head size,
C = 2·D + G·V channels of a key head, R tokens before its own that the convolution reads, X = D or 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn import functional

from longctx.kernels.gated_delta.chunk_spans import ChunkBlock


class GatedDeltaWeights(NamedTuple):
    """A layer's learned weights, heads first."""

    conv_KCR: Tensor
    """Convolution weights for queries, keys and values, shape [K, C, R + 1]; the token itself comes last."""
    log_rate_KG: Tensor
    """A."""
    rate_bias_KGX: Tensor
    """δ."""


class StateSpaceWeights(NamedTuple):
    """A Mamba-2 layer's learned weights, heads first: the fields of ``GatedDeltaWeights``, and two more."""

    conv_KCR: Tensor
    log_rate_KG: Tensor
    rate_bias_KGX: Tensor
    conv_bias_KC: Tensor
    """Convolution bias."""
    skip_KG: Tensor
    """Weight of a token's own values in its output."""


def weights_of(tensors: Sequence[Tensor]) -> GatedDeltaWeights | StateSpaceWeights:
    """Build the kind of weights that has this many fields."""
    if len(tensors) == len(StateSpaceWeights._fields):
        return StateSpaceWeights._make(tensors)
    return GatedDeltaWeights._make(tensors)


class ProjectedTokens(NamedTuple):
    """The layer's projections for each token."""

    q_BtKD: Tensor
    k_BtKD: Tensor
    v_BtKGV: Tensor
    a_BtKGX: Tensor
    b_BtKG: Tensor

    def rows(self, rows: slice) -> Self:
        """Slice all fields to these rows."""
        return self._make(x[:, rows] for x in self)

    def channels(self, rows: slice) -> Tensor:
        """Return the channels that the convolution reads, [B, t, K, C]."""
        return torch.cat((self.q_BtKD[:, rows], self.k_BtKD[:, rows], self.v_BtKGV[:, rows].flatten(3)), -1)


def conv_and_gates(
    conv_state_BRKC: Tensor,
    tokens: ProjectedTokens,
    weights: GatedDeltaWeights | StateSpaceWeights,
    block: ChunkBlock,
    beta_scale: float,
) -> ProjectedTokens:
    """Compute a block's queries, keys, values, g and β, in ``conv_state_BRKC``'s dtype; differentiable.

    ``conv_state_BRKC`` holds channels for the tokens before the block, 0 past the document's start.
    """
    dtype = conv_state_BRKC.dtype
    lookback, D = conv_state_BRKC.shape[1], tokens.q_BtKD.shape[-1]
    t = tokens.q_BtKD.shape[1]
    x = torch.cat((conv_state_BRKC, tokens.channels(slice(None)).to(dtype)), 1)
    conv_KCR = weights.conv_KCR.to(dtype)
    # a sum over shifted copies keeps channels contiguous, as the matmuls require
    y = x[:, lookback:] * conv_KCR[..., lookback]
    for distance in range(1, lookback + 1):
        part = x[:, lookback - distance : lookback - distance + t] * conv_KCR[..., lookback - distance]
        # the token at this distance may belong to another document
        if block.masks is not None:
            part = part * block.masks.lookback_tR[:, distance - 1, None, None]
        y = y + part
    is_state_space = isinstance(weights, StateSpaceWeights)
    if is_state_space:
        y = y + weights.conv_bias_KC.to(dtype)
    q, k, v = functional.silu(y).split((D, D, y.shape[-1] - 2 * D), -1)
    # rates are learned as logarithms, so none becomes negative
    rates = weights.log_rate_KG.to(dtype).exp().unsqueeze(-1)
    decay = -rates * functional.softplus(tokens.a_BtKGX.to(dtype) + weights.rate_bias_KGX.to(dtype))
    if is_state_space:
        beta = functional.softplus(tokens.b_BtKG.to(dtype) + weights.rate_bias_KGX.to(dtype).squeeze(-1))
    else:
        beta = tokens.b_BtKG.to(dtype).sigmoid() * beta_scale
    return ProjectedTokens(q, k, v.unflatten(-1, tokens.v_BtKGV.shape[3:]), decay, beta)
