"""Attention by definition, in float64: slow, any device, any band. The measure for every other kernel."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from longctx.kernels.contract import Gradients, KernelRequest, Pair, Scores, accumulate_dtype, merge_

_ROWS = 512
"""Query rows whose scores exist at once."""


class ReferenceKernel:
    """Plain softmax attention, scores formed in float64 for at most 512 query rows at a time."""

    name = "reference"

    def supports(self, request: KernelRequest) -> str | None:
        return None if request.dtype.is_floating_point else f"{request.dtype} is no floating-point type"

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKD: Tensor, pairs: Sequence[Pair], *, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        q, k, v = _float64_heads(q_BtHD, k_BsKD, v_BsKD)
        out, lse = torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
        for pair in _row_blocks(pairs):
            rows, keys = slice(pair.q_start, pair.q_stop), slice(pair.k_start, pair.k_stop)
            values = _scores(q, k, pair, scores.scale)
            block_lse = values.logsumexp(-1)
            block_out = _weights(values, block_lse) @ v[:, :, keys]
            merge_(out[:, :, rows], lse[:, :, rows], block_out, block_lse)
        return out.transpose(1, 2).to(accumulate_dtype(q_BtHD.dtype)), lse.transpose(1, 2)

    def backward(
        self,
        dout_BtHD: Tensor,
        q_BtHD: Tensor,
        k_BsKD: Tensor,
        v_BsKD: Tensor,
        out_BtHD: Tensor,
        lse_BtH: Tensor,
        pairs: Sequence[Pair],
        *,
        scores: Scores,
    ) -> Gradients:
        q, k, v = _float64_heads(q_BtHD, k_BsKD, v_BsKD)
        dout, out = (x.double().transpose(1, 2) for x in (dout_BtHD, out_BtHD))
        lse, delta = lse_BtH.double().transpose(1, 2), (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for pair in _row_blocks(pairs):
            rows, keys = slice(pair.q_start, pair.q_stop), slice(pair.k_start, pair.k_stop)
            weights = _weights(_scores(q, k, pair, scores.scale), lse[:, :, rows])
            dscores = weights * (dout[:, :, rows] @ v[:, :, keys].mT - delta[:, :, rows]) * scores.scale
            dv[:, :, keys] += weights.mT @ dout[:, :, rows]
            dq[:, :, rows] += dscores @ k[:, :, keys]
            dk[:, :, keys] += dscores.mT @ q[:, :, rows]
        partial = accumulate_dtype(q_BtHD.dtype)
        K = k_BsKD.shape[2]
        dk, dv = (g.unflatten(1, (K, -1)).sum(2) for g in (dk, dv))  # query heads that shared a key head
        return Gradients(*(g.transpose(1, 2).to(partial) for g in (dq, dk, dv)))


def _float64_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[B, H, rows, D] in float64, key heads repeated for the query heads that share them."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def _row_blocks(pairs: Sequence[Pair]) -> Iterator[Pair]:
    for p in pairs:
        for start in range(p.q_start, p.q_stop, _ROWS):
            yield Pair(start, min(start + _ROWS, p.q_stop), p.k_start, p.k_stop, p.lo, p.hi)


def _scores(q: Tensor, k: Tensor, pair: Pair, scale: float) -> Tensor:
    scores = q[:, :, pair.q_start : pair.q_stop] @ k[:, :, pair.k_start : pair.k_stop].mT * scale
    i = torch.arange(pair.q_start, pair.q_stop, device=q.device)[:, None]
    j = torch.arange(pair.k_start, pair.k_stop, device=q.device)
    if pair.lo is not None:
        scores = scores.masked_fill(i - j < pair.lo, -torch.inf)
    if pair.hi is not None:
        scores = scores.masked_fill(i - j > pair.hi, -torch.inf)
    return scores


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """exp(scores − lse), and 0 on rows that see no key."""
    return torch.exp(scores - lse.unsqueeze(-1)).nan_to_num(0.0)
