"""Attention by definition, in float64: slow, any device, any band, any score. Reference for all other kernels."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from longctx.kernels.attention.bias import buckets, check_scores, distance_bias, soft_cap
from longctx.kernels.attention.kernel_interface import Gradients, KernelRequest, ScoreRules, merge_
from longctx.kernels.attention.slices import AttentionSlice, table_slices
from longctx.kernels.dtypes import accumulate_dtype

_ROWS = 512
"""Query rows per score block: bounds the memory for the scores."""


class ReferenceKernel:
    """Plain softmax attention in float64, at most 512 query rows at a time."""

    name = "reference"

    def supports(self, request: KernelRequest) -> str | None:
        if request.device_type == "mps":
            return "computes in float64, which mps lacks"
        if not request.dtype.is_floating_point:
            return f"needs a floating-point dtype, not {str(request.dtype).removeprefix('torch.')}"
        return None

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, slices: Tensor, *, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        check_scores(scores, q_BtHD.shape[2])
        q, k, v = _float64_heads(q_BtHD, k_BsKD, v_BsKV)
        out = q.new_zeros(q.shape[:-1] + v.shape[-1:])
        lse = q.new_full(q.shape[:-1], -torch.inf)
        for attn_slice in _row_blocks(slices):
            rows, keys = slice(attn_slice.q_start, attn_slice.q_stop), slice(attn_slice.k_start, attn_slice.k_stop)
            values = _scores(_logits(q[:, :, rows], k[:, :, keys], scores), attn_slice, scores)
            block_lse = values.logsumexp(-1)
            block_out = _weights(values, block_lse) @ v[:, :, keys]
            merge_(out[:, :, rows], lse[:, :, rows], block_out, block_lse)
        return out.transpose(1, 2).to(accumulate_dtype(q_BtHD.dtype)), lse.transpose(1, 2)

    def backward(
        self,
        dout_BtHV: Tensor,
        q_BtHD: Tensor,
        k_BsKD: Tensor,
        v_BsKV: Tensor,
        out_BtHV: Tensor,
        lse_BtH: Tensor,
        slices: Tensor,
        *,
        scores: ScoreRules,
    ) -> Gradients:
        check_scores(scores, q_BtHD.shape[2])
        q, k, v = _float64_heads(q_BtHD, k_BsKD, v_BsKV)
        dout, out = (x.double().transpose(1, 2) for x in (dout_BtHV, out_BtHV))
        lse, delta = lse_BtH.double().transpose(1, 2), (dout * out).sum(-1, keepdim=True)
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        bias, dbias_table = scores.relative_bias, scores.table_gradient(torch.float64)
        for attn_slice in _row_blocks(slices):
            rows, keys = slice(attn_slice.q_start, attn_slice.q_stop), slice(attn_slice.k_start, attn_slice.k_stop)
            logits = _logits(q[:, :, rows], k[:, :, keys], scores)
            # Global weights p: lse covers keys from other slices and other ranks too.
            weights = _weights(_scores(logits, attn_slice, scores), lse[:, :, rows])
            dscores = weights * (dout[:, :, rows] @ v[:, :, keys].mT - delta[:, :, rows])
            if bias is not None and dbias_table is not None:
                named = buckets(_relative_positions(attn_slice, q.device), bias).flatten()
                # Many pairs share a bucket; unlike index_add_, this adds them in a fixed order on every device.
                dbias_table.index_put_((named,), dscores.sum(0).flatten(1).T, accumulate=True)
            # Biases come after the cap, so only dq and dk get the cap's derivative 1 − tanh².
            if scores.softcap is not None:
                dscores = dscores * (1 - (logits / scores.softcap) ** 2)
            dv[:, :, keys] += weights.mT @ dout[:, :, rows]
            dq[:, :, rows] += dscores @ k[:, :, keys] * scores.scale
            dk[:, :, keys] += dscores.mT @ q[:, :, rows] * scores.scale
        # GQA: sum over the query heads that share a key head.
        dk, dv = (g.unflatten(1, (k_BsKD.shape[2], -1)).sum(2) for g in (dk, dv))
        partial = accumulate_dtype(q_BtHD.dtype)
        dq, dk, dv = (g.transpose(1, 2).to(partial) for g in (dq, dk, dv))
        if dbias_table is not None:
            dbias_table = dbias_table.to(partial)
        return Gradients(dq, dk, dv, dbias_table)


def _float64_heads(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convert to float64 [B, H, rows, D] and repeat key heads for GQA."""
    groups = q.shape[2] // k.shape[2]
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    return q, k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)


def _row_blocks(slices: Tensor) -> Iterator[AttentionSlice]:
    for whole in table_slices(slices):
        for start in range(whole.q_start, whole.q_stop, _ROWS):
            yield whole._replace(q_start=start, q_stop=min(start + _ROWS, whole.q_stop))


def _q_minus_k(attn_slice: AttentionSlice, device: torch.device) -> Tensor:
    """Return i − j for each pair of query row and key row."""
    i = torch.arange(attn_slice.q_start, attn_slice.q_stop, device=device)[:, None]
    return i - torch.arange(attn_slice.k_start, attn_slice.k_stop, device=device)


def _relative_positions(attn_slice: AttentionSlice, device: torch.device) -> Tensor:
    return attn_slice.step * _q_minus_k(attn_slice, device) + attn_slice.offset


def _logits(q: Tensor, k: Tensor, scores: ScoreRules) -> Tensor:
    """Return the scaled dot products after the soft cap."""
    logits = q @ k.mT * scores.scale
    if scores.softcap is not None:
        logits = soft_cap(logits, scores.softcap)
    return logits


def _scores(logits: Tensor, attn_slice: AttentionSlice, scores: ScoreRules) -> Tensor:
    """Add biases, and set −inf outside the slice's band."""
    if scores.needs_relative_positions:
        logits = logits + distance_bias(scores, _relative_positions(attn_slice, logits.device))
    q_minus_k = _q_minus_k(attn_slice, logits.device)
    if attn_slice.lo is not None:
        logits = logits.masked_fill(q_minus_k < attn_slice.lo, -torch.inf)
    if attn_slice.hi is not None:
        logits = logits.masked_fill(q_minus_k > attn_slice.hi, -torch.inf)
    return logits


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores − lse), and 0 on rows without a key."""
    # without this, −inf − (−inf) is NaN on such rows
    lse = lse.unsqueeze(-1)
    return torch.exp(scores - lse).masked_fill(lse == -torch.inf, 0.0)
