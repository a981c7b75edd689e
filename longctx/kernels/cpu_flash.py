"""PyTorch's CPU flash attention behind our kernel contract.

Traps of the ATen op that stay in here: its causal mask is aligned top-left whatever the two lengths are; rows without
a key come back as out = 0 *and lse = 0* (so no such row is ever passed in); its log-sum-exp has the strides of
[B, S, H] under the shape [B, H, S]; its outputs are in the input's dtype. Grouped-query attention is native, and
transposed [B, S, H, D] views cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.contract import KernelRequest, Pair, accumulate_dtype, merge

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    """The fast kernel on CPUs: within 4 % of one process's ``scaled_dot_product_attention`` in a ring."""

    name = "cpu_flash"

    def supports(self, request: KernelRequest) -> str | None:
        if request.device_type != "cpu":
            return f"it runs on the CPU, not on {request.device_type}"
        if request.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            return f"it has no {request.dtype}"
        return None

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKD: Tensor, pairs: Sequence[Pair], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        partial = accumulate_dtype(q_BtHD.dtype)
        work = [block for pair in pairs for block in blocks(pair)]
        whole = slice(0, q_BtHD.shape[1])
        if len(work) == 1 and work[0].q == whole:
            out, lse = _block_forward(q_BtHD, k_BsKD, v_BsKD, work[0], scale)
            return out.to(partial), lse
        out = q_BtHD.new_zeros(q_BtHD.shape, dtype=partial)
        lse = q_BtHD.new_full(q_BtHD.shape[:-1], -torch.inf, dtype=partial)
        touched = torch.zeros(q_BtHD.shape[1], dtype=torch.bool)
        for block in work:
            block_out, block_lse = _block_forward(q_BtHD, k_BsKD, v_BsKD, block, scale)
            if touched[block.q].any():
                block_out, block_lse = merge(out[:, block.q], lse[:, block.q], block_out, block_lse)
            out[:, block.q], lse[:, block.q] = block_out, block_lse
            touched[block.q] = True
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
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        inputs = (q_BtHD, k_BsKD, v_BsKD)
        grads = [x.new_zeros(x.shape, dtype=accumulate_dtype(x.dtype)) for x in inputs]
        for block in (b for pair in pairs for b in blocks(pair)):
            rows = (block.q, block.k, block.k)
            q, k, v = (x[:, r].transpose(1, 2) for x, r in zip(inputs, rows, strict=True))
            dout, out = (x[:, block.q].transpose(1, 2) for x in (dout_BtHD, out_BtHD))
            lse = lse_BtH[:, block.q].transpose(1, 2)
            parts = _backward(dout, q, k, v, out, lse, 0.0, block.causal, attn_mask=None, scale=scale)
            for grad, row, part in zip(grads, rows, parts, strict=True):
                grad[:, row] += part.transpose(1, 2)
        return grads[0], grads[1], grads[2]


def _block_forward(q: Tensor, k: Tensor, v: Tensor, block: Block, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, rows, H, D] in q's dtype and log-sum-exp [B, rows, H] of one block, both owned by the caller."""
    q, k, v = (x[:, rows].transpose(1, 2) for x, rows in ((q, block.q), (k, block.k), (v, block.k)))
    out, lse = _forward(q, k, v, 0.0, block.causal, attn_mask=None, scale=scale)
    return out.transpose(1, 2), lse.transpose(1, 2)
