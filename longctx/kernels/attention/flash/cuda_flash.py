"""PyTorch's own CUDA flash attention behind our kernel contract; needs nothing but PyTorch.

Written for ``aten::_flash_attention_forward`` and ``aten::_flash_attention_backward`` of PyTorch 2.11 to 2.13. It is
flash-attn 2 inside and shares that kernel's traps (``flash2``): windows counted from the bottom-right corner and
clamped by the longest key sequence, log-sum-exps [H, n], one head size, a multiple of 8.

Its backward has no soft cap and no ALiBi, and is deterministic only under ``torch.use_deterministic_algorithms(True)``,
a switch of the whole process that we leave alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.attention.contract import KernelRequest, Scores
from longctx.kernels.attention.flash.adapter import (
    Sequences,
    VarlenKernel,
    equal_head_size,
    from_heads,
    padded,
    refusal,
    to_heads,
)
from longctx.kernels.attention.flash.flash2 import window_of


class CudaFlashKernel(VarlenKernel):
    """Any mask; bfloat16 and float16 heads up to 256."""

    base = "cuda_flash"

    def supports(self, request: KernelRequest) -> str | None:
        if why := refusal(request, lacks=("softcap", "alibi", "relative_bias")):
            return why
        capability = self.device_capability()
        if capability is None or capability < (8, 0):
            return "it needs a CUDA device of compute capability 8.0 or newer"
        if self.ops is None and not torch.backends.cuda.is_flash_attention_available():
            return "this PyTorch was built without flash attention"
        if request.deterministic and not _deterministic_mode():
            return "its backward is deterministic only after torch.use_deterministic_algorithms(True)"
        return None

    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        V, size = v_mKV.shape[-1], equal_head_size(q_nHD.shape[-1], v_mKV.shape[-1])
        q, k, v = (padded(x, size) for x in (q_nHD, k_mKD, v_mKV))
        window = window_of(call)
        out, lse_Hn, *_ = self._ops()._flash_attention_forward(
            q,
            k,
            v,
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            window.pop("max_seqlen_k"),
            0.0,
            False,
            False,
            scale=scores.scale,
            **window,
        )
        return out[..., :V], from_heads(lse_Hn)

    def call_backward(
        self,
        dout_nHV: Tensor,
        q_nHD: Tensor,
        k_mKD: Tensor,
        v_mKV: Tensor,
        out_nHV: Tensor,
        lse_nH: Tensor,
        call: Sequences,
        scores: Scores,
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        D, V = q_nHD.shape[-1], v_mKV.shape[-1]
        size = equal_head_size(D, V)
        dout, q, k, v, out = (padded(x.to(q_nHD.dtype), size) for x in (dout_nHV, q_nHD, k_mKD, v_mKV, out_nHV))
        window = window_of(call)
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)  # read with dropout only
        dq, dk, dv = self._ops()._flash_attention_backward(
            dout,
            q,
            k,
            v,
            out,
            to_heads(lse_nH),
            call.cu_seqlens_q,
            call.cu_seqlens_k,
            call.max_seqlen_q,
            window.pop("max_seqlen_k"),
            0.0,
            False,
            random_state,
            random_state.new_empty(()),
            scale=scores.scale,
            **window,
        )
        return dq[..., :D], dk[..., :D], dv[..., :V], None

    def _ops(self) -> Any:
        return torch.ops.aten if self.ops is None else self.ops


def _deterministic_mode() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
