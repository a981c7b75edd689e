"""flash-attn 3 (Hopper) behind our kernel contract.

Written for the operators ``flash_attn_3::fwd`` and ``flash_attn_3::bwd`` that ``flash_attn_3._C`` 3.0.0 registers. The
Python functions around them changed their windows from a pair to two numbers; the operators' names stayed. They count
windows from the bottom-right corner, clamp them exactly, and give log-sum-exps [H, n] in natural units.

Queries and values may differ in head size where the library has a kernel for it (192 and 128, DeepSeek's MLA); others
are padded to one size. There is no ALiBi.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.contract import KernelRequest, Scores
from longctx.kernels.attention.flash.adapter import (
    Sequences,
    VarlenKernel,
    equal_head_size,
    from_heads,
    import_library,
    padded,
    refusal,
    to_heads,
)


class Flash3Kernel(VarlenKernel):
    """Any mask and soft cap; bfloat16 and float16 heads up to 256."""

    base = "flash3"

    def supports(self, request: KernelRequest) -> str | None:
        if why := refusal(request, lacks=("alibi", "relative_bias")):
            return why
        if why := self.not_deterministic(request):
            return why
        if self.ops is None and isinstance(library := import_library("flash_attn_3._C"), str):
            return library
        capability = self.device_capability()
        if capability is None or capability[0] != 9:
            return "it is written for Hopper (compute capability 9.0)"
        head = max(head_sizes(request.head_dim, request.value_dim or request.head_dim))
        if request.deterministic and head > 192:
            return f"its deterministic backward takes heads up to 192, not {head}"
        return None

    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        V = v_mKV.shape[-1]
        D_padded, V_padded = head_sizes(q_nHD.shape[-1], V)
        q, k, v = padded(q_nHD, D_padded), padded(k_mKD, D_padded), padded(v_mKV, V_padded)
        out, lse_Hn, *_ = self._ops().fwd(q, k, v, num_splits=1, **_options(call, scores))
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
        D_padded, V_padded = head_sizes(D, V)
        q, k = padded(q_nHD, D_padded), padded(k_mKD, D_padded)
        dout, v, out = (padded(x.to(q.dtype), V_padded) for x in (dout_nHV, v_mKV, out_nHV))
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._ops().bwd(
            dout.contiguous(),
            q,
            k,
            v,
            out.contiguous(),
            to_heads(lse_nH),
            dq,
            dk,
            dv,
            deterministic=self.deterministic,
            **_options(call, scores),
        )
        return dq[..., :D], dk[..., :D], dv[..., :V], None

    def _ops(self) -> Any:
        if self.ops is not None:
            return self.ops
        if isinstance(library := import_library("flash_attn_3._C"), str):
            raise ConfigError(f"parallel.kernel={self.name}: {library}. Try parallel.kernel=auto.")
        return torch.ops.flash_attn_3


def head_sizes(head_dim: int, value_dim: int) -> tuple[int, int]:
    """The query/key and value head sizes to pad to."""
    if 128 < head_dim <= 192 and 96 < value_dim <= 128:
        return equal_head_size(head_dim, 0), equal_head_size(value_dim, 0)
    size = equal_head_size(head_dim, value_dim)
    return size, size


def _options(call: Sequences, scores: Scores) -> dict[str, Any]:
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
        "softmax_scale": scores.scale,
        "is_causal": False,  # the window says so
        "window_size_left": call.left,
        "window_size_right": call.right,
        "softcap": scores.softcap or 0.0,
    }
