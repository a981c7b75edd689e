"""PyTorch's CPU flash attention behind our kernel contract.

Traps of the ATen op that stay in here: its causal mask is aligned top-left whatever the two lengths are; rows without
a key come back as out = 0 *and lse = 0* (so no such row is ever passed in); its log-sum-exp has the strides of
[B, S, H] under the shape [B, H, S]; its outputs are in the input's dtype. Grouped-query attention is native, and
transposed [B, S, H, D] views cost nothing.

Two measures make float32 gradients more exact than the op's own, for a few per cent of its time: forward works in
tiles, whose log-sum-exps are merged in float64 (each tile's is rounded on its own, so the errors average out), and
backward works near exponent 0, where float32 is finest (``_centre``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.contract import Gradients, KernelRequest, Pair, Scores, accumulate_dtype, merge_

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


_TILE = 1024
"""Rows and keys of a tile in float32."""


class Block(NamedTuple):
    """A rectangle the op takes as it is: full, or causal with query row 0 aligned to key row 0."""

    q: slice
    k: slice
    causal: bool


def blocks(pair: Pair) -> Iterator[Block]:
    """The pair cut into rectangles and top-left-aligned triangles; rows that see no key are left out."""
    if pair.hi is not None:
        raise ConfigError("kernel cpu_flash takes no window; use parallel.kernel=reference.")
    q0, k0, k1 = pair.q_start, pair.k_start, pair.k_stop
    if pair.lo is not None:
        offset = pair.lo - (q0 - k0)  # relative rows meet where i - j >= offset
        if offset > 0:
            q0 += offset
        elif offset < 0:
            whole = min(-offset, k1 - k0)
            if whole > 0 and pair.q_stop > q0:
                yield Block(slice(q0, pair.q_stop), slice(k0, k0 + whole), False)
            k0 += whole
        k1 = min(k1, k0 + pair.q_stop - q0)
    if q0 < pair.q_stop and k0 < k1:
        yield Block(slice(q0, pair.q_stop), slice(k0, k1), pair.lo is not None)


class CpuFlashKernel:
    """The fast kernel on CPUs; docs/parallel.md holds a ring of it against ``scaled_dot_product_attention``."""

    name = "cpu_flash"

    def supports(self, request: KernelRequest) -> str | None:
        if request.device_type != "cpu":
            return f"it runs on the CPU, not on {request.device_type}"
        if request.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"it has no {request.dtype}"
        return None

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKD: Tensor, pairs: Sequence[Pair], *, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        work = [tile for pair in pairs for block in blocks(pair) for tile in _tiles(block, q_BtHD.dtype)]
        out = q_BtHD.new_empty(q_BtHD.shape, dtype=accumulate_dtype(q_BtHD.dtype))
        lse = q_BtHD.new_full(q_BtHD.shape[:-1], -torch.inf, dtype=torch.float64)
        touched = torch.zeros(q_BtHD.shape[1], dtype=torch.bool)
        for tile in work:
            tile_out, tile_lse = _block_forward(q_BtHD, k_BsKD, v_BsKD, tile, scores.scale)
            if touched[tile.q].any():
                merge_(out[:, tile.q], lse[:, tile.q], tile_out.to(out.dtype), tile_lse.double())
            else:
                out[:, tile.q], lse[:, tile.q] = tile_out, tile_lse
            touched[tile.q] = True
        if not touched.all():
            out[:, ~touched] = 0
        return out, lse

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
        dout_BtHD, lse_BtH = _centre(dout_BtHD, lse_BtH)
        inputs = (q_BtHD, k_BsKD, v_BsKD)
        work = [block for pair in pairs for block in blocks(pair)]

        def gradients(block: Block) -> list[Tensor]:
            q, k, v = (x[:, r].transpose(1, 2) for x, r in zip(inputs, (block.q, block.k, block.k), strict=True))
            dout, out = (x[:, block.q].transpose(1, 2) for x in (dout_BtHD, out_BtHD))
            lse = lse_BtH[:, block.q].transpose(1, 2)
            parts = _backward(dout, q, k, v, out, lse, 0.0, block.causal, attn_mask=None, scale=scores.scale)
            return [part.transpose(1, 2).to(accumulate_dtype(part.dtype)) for part in parts]

        everything = (slice(0, q_BtHD.shape[1]), slice(0, k_BsKD.shape[1]))
        if len(work) == 1 and (work[0].q, work[0].k) == everything:  # the usual hop: nothing to add up
            dq, dk, dv = gradients(work[0])
            return Gradients(dq, dk, dv)
        dq, dk, dv = (x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype)) for x in inputs)
        for block in work:
            for total, rows, part in zip((dq, dk, dv), (block.q, block.k, block.k), gradients(block), strict=True):
                total[:, rows] += part
        return Gradients(dq, dk, dv)


def _tiles(block: Block, dtype: torch.dtype) -> Iterator[Block]:
    """The block in pieces of at most ``_TILE`` rows and keys, where tiling pays: in float32."""
    if dtype != torch.float32:
        yield block
        return
    for q in range(block.q.start, block.q.stop, _TILE):
        rows = slice(q, min(q + _TILE, block.q.stop))
        seen = rows.stop - block.q.start if block.causal else block.k.stop - block.k.start
        stop = min(block.k.stop, block.k.start + seen)
        for k in range(block.k.start, stop, _TILE):
            diagonal = block.causal and k - block.k.start == q - block.q.start
            yield Block(rows, slice(k, min(k + _TILE, stop)), diagonal)


def _centre(dout_BtHD: Tensor, lse_BtH: Tensor) -> tuple[Tensor, Tensor]:
    """Output gradients and log-sum-exps, scaled alike by powers of two so that the latter lie near 0.

    Every gradient is linear in exp(score − lse) · dout. With lse − m·ln 2 in place of lse and dout · 2^−m in place of
    dout it comes out the same, the scaling is exact, and the exponents are where float32 has its finest steps.
    """
    if dout_BtHD.dtype != torch.float32:
        return dout_BtHD, lse_BtH.to(accumulate_dtype(dout_BtHD.dtype))
    m_BtH = (lse_BtH / math.log(2)).round_().nan_to_num_(neginf=0.0).clamp_(-40, 40)  # 2^-40 keeps dout far from 0
    power_BtH = torch.ldexp(torch.ones_like(m_BtH, dtype=torch.float32), -m_BtH.int())
    return dout_BtHD * power_BtH.unsqueeze(-1), (lse_BtH - m_BtH * math.log(2)).float()


def _block_forward(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, rows, H, D] in q's dtype and log-sum-exp [B, rows, H] of one block, both owned by the caller."""
    q, k, v = (x[:, rows].transpose(1, 2) for x, rows in ((q, block.q), (k, block.k), (v, block.k)))
    out, lse = _forward(q, k, v, 0.0, block.causal, attn_mask=None, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)
