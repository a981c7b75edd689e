"""The layer between a gated delta layer's projections and its output norm, token by token, in plain operations."""

from __future__ import annotations

import torch
from torch.nn import functional

from longctx.kernels.gated_delta.front import GatedDeltaWeights, ProjectedTokens, StateSpaceWeights


def plain(tokens, weights, bounds, beta_scale=1.0, state=None, before=None):
    """The output [B, t, H, V] and the state after the last token; ``state`` and ``before`` precede the first one."""
    q, k, v, a, b = tokens
    B, T, K, D = q.shape
    G, V = v.shape[3:]
    x = torch.cat((q, k, v.flatten(3)), -1)
    reach = weights.conv_KCR.shape[-1] - 1
    outputs = []
    starts = set(bounds[:-1])
    for t in range(T):
        if t in starts and not (t == 0 and state is not None):
            state, window = v.new_zeros(B, K, G, D, V), x.new_zeros(B, reach, K, x.shape[-1])
        elif t == 0:
            state, window = state.unflatten(1, (K, G)), before
        window = torch.cat((window, x[:, t : t + 1]), 1)
        y = torch.einsum("brkc,kcr->bkc", window, weights.conv_KCR)
        is_mamba = isinstance(weights, StateSpaceWeights)
        y = functional.silu(y + weights.conv_bias_KC if is_mamba else y)
        window = window[:, 1:]
        qt, kt, vt = y[..., :D], y[..., D : 2 * D], y[..., 2 * D :].unflatten(-1, (G, V))
        if not is_mamba:
            qt, kt = (z / (z.square().sum(-1, keepdim=True) + 1e-6).sqrt() for z in (qt, kt))
        g = -weights.log_rate_KG.exp()[..., None] * functional.softplus(a[:, t] + weights.rate_bias_KGX)
        state = state * g.exp()[..., None]
        if is_mamba:
            written = vt * functional.softplus(b[:, t] + weights.rate_bias_KGX[..., 0])[..., None]
        else:
            read = torch.einsum("bkgdv,bkd->bkgv", state, kt)
            written = (vt - read) * (b[:, t].sigmoid() * beta_scale)[..., None]
        state = state + kt[:, :, None, :, None] * written[..., None, :]
        out = torch.einsum("bkgdv,bkd->bkgv", state, qt)
        outputs.append(out + weights.skip_KG[..., None] * vt if is_mamba else out * D**-0.5)
    return torch.stack(outputs, 1).flatten(2, 3), state.flatten(1, 2)


def make(t, *, K=2, G=2, D=6, V=5, X=1, reach=3, batch=2, dtype=torch.float64, seed=0, mamba=False):
    """Tokens and weights of a layer, as leaves; with ``mamba`` of Mamba-2."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0, shift=0.0):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift
        return x.to(dtype).requires_grad_()

    tokens = ProjectedTokens(
        normal(batch, t, K, D),
        normal(batch, t, K, D),
        normal(batch, t, K, G, V),
        normal(batch, t, K, G, X),
        normal(batch, t, K, G),
    )
    weights = GatedDeltaWeights(
        normal(K, 2 * D + G * V, reach + 1, scale=0.5), normal(K, G, shift=0.5), normal(K, G, X)
    )
    if mamba:
        weights = StateSpaceWeights(*weights, normal(K, 2 * D + G * V), normal(K, G))
    return tokens, weights
