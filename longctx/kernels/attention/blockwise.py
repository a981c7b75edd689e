"""Attention in plain PyTorch, tile by tile: any device, any floating-point dtype, every rule in ``ScoreRules``.

Apart from inputs and results it allocates only a few tensors with at most B·H·512·512 elements, independent of the
sequence length. float64 inputs are computed in float64, all others in float32.

Axes: B batch, t query rows, s key rows, H query heads, K key/value heads, G = H / K query heads that share one, D and V
head sizes, R rows and S keys of a tile.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from longctx.kernels.attention.attention_tiles import RowBlock, Tile, centred, fold_, row_blocks
from longctx.kernels.attention.bias import (
    check_scores,
    distance_bias,
    expand_diagonals,
    gather_diagonals,
    soft_cap,
    table_gradient,
    tile_relative_positions,
)
from longctx.kernels.attention.kernel_interface import Gradients, KernelRequest, ScoreRules, merge_
from longctx.kernels.attention.slices import AttentionSlice, table_slices
from longctx.kernels.dtypes import accumulate_dtype

_TILE = 512
"""Maximum rows and keys per tile; a tile in a narrow band has fewer rows and up to twice as many keys."""
_LEAST = -60.0
"""Exponents at or below this yield exactly 0."""


class BlockwiseKernel:
    """The most general kernel: softmax attention from matmuls, without materializing the S×S scores."""

    name = "blockwise"

    def supports(self, request: KernelRequest) -> str | None:
        if not request.dtype.is_floating_point or request.dtype.itemsize < 2:
            dtype = str(request.dtype).removeprefix("torch.")
            return f"needs a floating-point dtype with 16 bits or more, not {dtype}"
        if request.device_type == "mps":
            return "the log-sum-exps are float64, which mps lacks"
        return None

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, slices: Tensor, *, scores: ScoreRules
    ) -> tuple[Tensor, Tensor]:
        check_scores(scores, q_BtHD.shape[2])
        partial = accumulate_dtype(q_BtHD.dtype)
        B, t, H, _ = q_BtHD.shape
        out = q_BtHD.new_zeros((B, t, H, v_BsKV.shape[3]), dtype=partial)
        lse = q_BtHD.new_full((B, t, H), -torch.inf, dtype=torch.float64)
        for attn_slice in table_slices(slices):
            for block in row_blocks(attn_slice, rows=_TILE, keys=_TILE):
                q = _query_rows(q_BtHD, block.q, k_BsKD.shape[2])
                block_out, block_lse = _forward_block(q, k_BsKD, v_BsKV, attn_slice, block, scores)
                # other slices may already have written these query rows, over other keys
                block_out, block_lse = _as_rows(block_out), _as_rows(block_lse.unsqueeze(-1)).squeeze(-1)
                merge_(out[:, block.q], lse[:, block.q], block_out, block_lse)
        return out, lse

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
        partial, K = accumulate_dtype(q_BtHD.dtype), k_BsKD.shape[2]
        dq, dk, dv = (torch.zeros_like(x, dtype=partial) for x in (q_BtHD, k_BsKD, v_BsKV))
        # float64: each entry sums the gradient over many full diagonals
        dbias_table = scores.table_gradient(torch.float64)
        power_BtH, lse_BtH = _centred(lse_BtH, partial)
        for attn_slice in table_slices(slices):
            for block in row_blocks(attn_slice, rows=_TILE, keys=_TILE):
                q, dout, out = (_query_rows(x, block.q, K) for x in (q_BtHD, dout_BtHV, out_BtHV))
                power, lse = (_query_rows(x.unsqueeze(-1), block.q, K) for x in (power_BtH, lse_BtH))
                # Weights are computed near exponent 0; dout carries the missing power of two.
                dout = dout * power
                rows = _Rows(q, dout, lse, (dout * out).sum(-1, keepdim=True))
                dq_block = torch.zeros_like(q)
                for tile in block.tiles:
                    work = _Work(attn_slice, block.q, tile, scores)
                    dk_tile, dv_tile = _tile_gradients(rows, k_BsKD, v_BsKV, work, dq_block, dbias_table)
                    dk[:, tile.k] += dk_tile.transpose(1, 2)
                    dv[:, tile.k] += dv_tile.transpose(1, 2)
                dq[:, block.q] += _as_rows(dq_block)
        if dbias_table is not None:
            dbias_table = dbias_table.to(partial)
        return Gradients(dq, dk, dv, dbias_table)


class _Work(NamedTuple):
    """One tile and the values its scores depend on."""

    attn_slice: AttentionSlice
    q: slice
    tile: Tile
    scores: ScoreRules


class _Rows(NamedTuple):
    """One row block's query tensors for the backward pass, [B, K, G, R, …] each."""

    q: Tensor
    dout: Tensor
    lse: Tensor
    delta: Tensor
    """Σ dout·out per row: D in FlashAttention (arXiv 2205.14135, algorithm 4), so that dscore = p · (dout·v − D)."""


def _query_rows(x_BtHX: Tensor, rows: slice, num_kv_heads: int) -> Tensor:
    """Return [B, K, G, R, X] in the compute dtype, with heads that share keys adjacent."""
    x = x_BtHX[:, rows].to(accumulate_dtype(x_BtHX.dtype))
    return x.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).contiguous()


def _as_rows(x_BKGRX: Tensor) -> Tensor:
    """Invert ``_query_rows``."""
    return x_BKGRX.permute(0, 3, 1, 2, 4).flatten(2, 3)


def _key_rows(x_BsKX: Tensor, keys: slice) -> Tensor:
    """Return [B, K, S, X] in the compute dtype."""
    return x_BsKX[:, keys].to(accumulate_dtype(x_BsKX.dtype)).transpose(1, 2)


def _centred(lse_BtH: Tensor, partial: torch.dtype) -> tuple[Tensor, Tensor]:
    if partial == torch.float64:
        return torch.ones_like(lse_BtH), lse_BtH
    return centred(lse_BtH)


def _forward_block(
    q: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, attn_slice: AttentionSlice, block: RowBlock, scores: ScoreRules
) -> tuple[Tensor, Tensor]:
    """Compute output [B, K, G, R, V] and float64 log-sum-exp [B, K, G, R] for one row block."""
    # Online softmax (arXiv 1805.02867, FlashAttention-2's forward, arXiv 2307.08691): softmax each tile on its own,
    # then merge tiles by their log-sum-exps. Invariant: after each tile, out and lse equal exact attention over all
    # keys so far.
    out: Tensor | None = None
    lse: Tensor | None = None
    for tile in block.tiles:
        k, v = _key_rows(k_BsKD, tile.k), _key_rows(v_BsKV, tile.k)
        values = _add_bias_and_mask_(_capped_logits(q, k, scores), _Work(attn_slice, block.q, tile, scores))
        # shift by each row's largest score, so that no exponential exceeds 1
        peak = values.amax(-1, keepdim=True)
        weights = _exp_(values.sub_(peak))
        row_sum = weights.sum(-1, keepdim=True)
        tile_out = (weights.flatten(2, 3) @ v).unflatten(2, q.shape[2:4]).div_(row_sum)
        tile_lse = (peak.double() + row_sum.double().log()).squeeze(-1)
        # every row sees a key in each tile, so neither log-sum-exp is −inf
        if out is None or lse is None:
            out, lse = tile_out, tile_lse
        else:
            fold_(out, lse, tile_out, tile_lse)
    assert out is not None, "row block without a tile"
    assert lse is not None
    return out, lse


def _capped_logits(q: Tensor, k: Tensor, scores: ScoreRules) -> Tensor:
    """Return the scaled dot products [B, K, G, R, S] after the soft cap."""
    values = (q.flatten(2, 3) @ k.mT).unflatten(2, q.shape[2:4]).mul_(scores.scale)
    if scores.softcap is not None:
        values = soft_cap(values, scores.softcap)
    return values


def _add_bias_and_mask_(values: Tensor, work: _Work) -> Tensor:
    """Turn ``_capped_logits`` into scores in place: add biases, set −inf outside the tile's band."""
    num_rows, num_keys, tile = values.shape[3], values.shape[4], work.tile
    if work.scores.needs_relative_positions:
        # Only R + S − 1 distances occur among R · S scores: compute each bias once and expand a view.
        relative_positions_n = tile_relative_positions(work.attn_slice, work.q, tile.k, values.device)
        bias_HRS = expand_diagonals(distance_bias(work.scores, relative_positions_n).to(values.dtype), num_keys)
        values += bias_HRS.unflatten(0, values.shape[1:3])
    if tile.lo is not None or tile.hi is not None:
        i = torch.arange(num_rows, device=values.device)[:, None]
        q_minus_k = i - torch.arange(num_keys, device=values.device)
        if tile.lo is not None:
            values.masked_fill_(q_minus_k < tile.lo, -torch.inf)
        if tile.hi is not None:
            values.masked_fill_(q_minus_k > tile.hi, -torch.inf)
    return values


def _exp_(exponents: Tensor) -> Tensor:
    """Exponentiate in place and flush values up to e^−60, too small to change any row's sum, to exactly 0."""
    # CPUs are a hundred times slower on float32 denormals, and ALiBi produces thousands.
    weights = exponents.clamp_(min=_LEAST).exp_()
    # every clamped value, including the mask's −inf, is now e^−60, just below the threshold
    return functional.threshold(weights, 1.001 * math.exp(_LEAST), 0.0, inplace=True)


def _tile_gradients(
    rows: _Rows, k_BsKD: Tensor, v_BsKV: Tensor, work: _Work, dq: Tensor, dbias_table_NH: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return one tile's key and value gradients [B, K, S, …].

    Add the query and bias table gradients to ``dq`` and ``dbias_table_NH``.
    """
    # FlashAttention's backward: recompute p = exp(score − lse) per tile. lse is global, so p sums to 1 over all keys on
    # all ranks, and tile gradients only need to be added.
    k, v = _key_rows(k_BsKD, work.tile.k), _key_rows(v_BsKV, work.tile.k)
    logits, cap = _capped_logits(rows.q, k, work.scores), work.scores.softcap
    slope: Tensor | None = None
    if cap is not None:
        # The derivative of cap · tanh(x / cap) is 1 − tanh²; computed here, because the scores overwrite the products.
        slope = (logits / cap).square_().neg_().add_(1)
    weights = _exp_(_add_bias_and_mask_(logits, work).sub_(rows.lse))

    # dv = pᵀ · dout, and through the softmax dscore = p · (dout·v − delta)
    dout = rows.dout.flatten(2, 3)
    dv = weights.flatten(2, 3).mT @ dout
    dscores = (dout @ v.mT).view_as(weights).sub_(rows.delta).mul_(weights)
    if dbias_table_NH is not None and work.scores.relative_bias is not None:
        # the bias is added after the cap, so its gradient equals dscores
        relative_positions_n = tile_relative_positions(work.attn_slice, work.q, work.tile.k, dscores.device)
        dvalues_Hn = gather_diagonals(dscores.sum(0).flatten(0, 1))
        dbias_table_NH += table_gradient(dvalues_Hn, relative_positions_n, work.scores.relative_bias)

    # through cap and scale to queries and keys
    if slope is not None:
        dscores.mul_(slope)
    dqk = dscores.mul_(work.scores.scale).flatten(2, 3)
    dq += (dqk @ k).view_as(dq)
    return dqk.mT @ rows.q.flatten(2, 3), dv
