"""What an attention kernel on one device promises, and the words it is asked in.

Axes: B batch, t query rows and s key rows on this device, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Pair:
    """Query rows [q_start, q_stop) meet key rows [k_start, k_stop) where ``lo <= i - j <= hi``.

    i and j are row indices into the tensors handed to the kernel (not offsets within the ranges); ``None`` leaves a
    side open. Causal attention of a document whose queries and keys lie in the same rows is ``lo=0``; a full rectangle
    has no bounds.
    """

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    lo: int | None = None
    hi: int | None = None


@dataclass(frozen=True, slots=True)
class KernelRequest:
    """What is asked of a kernel, before any tensor exists."""

    device_type: str
    dtype: torch.dtype
    head_dim: int
    num_heads: int
    num_kv_heads: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}, {dtype}, on {self.device_type}"


class AttentionKernel(Protocol):
    """Softmax attention over the pairs of one device, and its gradient.

    Several pairs may name the same query row, over disjoint keys; the kernel merges them. Results are *partial
    results*: owned by the caller and in ``accumulate_dtype`` (float32; float64 for float64 inputs), so that they can be
    merged across hops without rounding. Log-sum-exps are float64: over 8192 keys one is about 9, where float32 is
    5e-7 coarse, and every gradient of the row inherits that error.
    """

    name: str

    def supports(self, request: KernelRequest) -> str | None:
        """None when the kernel can serve the request, else the reason why not."""
        ...

    def forward(
        self, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKD: Tensor, pairs: Sequence[Pair], *, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Output [B, t, H, D] and natural log-sum-exp [B, t, H] (float64); 0 and −inf on rows without a key."""
        ...

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
        """dq, dk, dv of these pairs alone, given the *global* output and log-sum-exp of every query row.

        Summed over all keys a query meets, on whatever ranks, they are the exact gradient.
        """
        ...


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of partial results for inputs of ``dtype``."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def merge_(out: Tensor, lse: Tensor, block_out: Tensor, block_lse: Tensor) -> None:
    """Fold a softmax result over other keys into ``out`` [..., D] and ``lse`` [...], in place.

    The log-sum-exps are float64; a row without a key in one of the two takes the other's.
    """
    total = torch.logaddexp(lse, block_lse)
    keep, add = (torch.exp(part - total).nan_to_num_(0.0).to(out.dtype).unsqueeze(-1) for part in (lse, block_lse))
    out.mul_(keep).addcmul_(block_out, add)
    lse.copy_(total)
