"""What a library's gated delta rule computes, token by token, with the arguments of flash-linear-attention."""

from __future__ import annotations

from itertools import pairwise

import torch


def plain_rule(q, k, v, g, beta, *, initial_state, output_final_state, use_qk_l2norm_in_kernel, cu_seqlens):
    """Outputs [1, T, H, V], and the states [n, H, D, V] behind the sequences; of inputs as libraries check them."""
    assert use_qk_l2norm_in_kernel
    assert len(q) == 1
    assert cu_seqlens.dtype == torch.int64
    bounds = cu_seqlens.tolist()
    # Their count of sequences goes by first chunks.
    assert all(start < stop for start, stop in pairwise(bounds))
    H, D, V = v.shape[2], q.shape[-1], v.shape[-1]
    if initial_state is not None:
        assert initial_state.shape == (len(bounds) - 1, H, D, V)
        assert initial_state.dtype == g.dtype
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(H // x.shape[2], 2).to(g.dtype) for x in (q * D**-0.5, k))
    outputs, behind = [], []
    for n, (start, stop) in enumerate(pairwise(bounds)):
        state = g.new_zeros(H, D, V) if initial_state is None else initial_state[n]
        for t in range(start, stop):
            decay = g[0, t].exp()
            state = state * (decay[..., None] if decay.ndim == 2 else decay[:, None, None])
            read = torch.einsum("hdv,hd->hv", state, k[0, t])
            written = (v[0, t] - read) * beta[0, t, :, None]
            state = state + k[0, t, :, :, None] * written[:, None]
            outputs.append(torch.einsum("hdv,hd->hv", state, q[0, t]))
        behind.append(state)
    return torch.stack(outputs)[None].to(v.dtype), torch.stack(behind) if output_final_state else None
