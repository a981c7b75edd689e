"""flash-attn 4 (``flash_attn.cute``; Hopper and Blackwell) behind our kernel contract.

Written for ``_flash_attn_fwd`` and ``_flash_attn_bwd`` of flash-attn-4 4.0.0b36. Windows are counted from the
bottom-right corner, ``None`` leaves a side open; log-sum-exps are [H, n] in natural units. Kernels are compiled when a
combination of head size, mask and dtype is first met, which takes seconds.

Which head sizes exist depends on the chip (``head_sizes``): on Hopper any two up to 256, on Blackwell up to 128, 192
with values of 128, and 256; between them we pad. Consumer Blackwell (12.x) has neither a soft cap nor a deterministic
backward, and Ampere has no backward at all.
"""

from __future__ import annotations

from typing import Any

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
from longctx.kernels.attention.flash.calls import OPEN


class Flash4Kernel(VarlenKernel):
    """Any mask and soft cap; bfloat16 and float16 heads up to 256 (128 on consumer Blackwell)."""

    base = "flash4"

    def supports(self, request: KernelRequest) -> str | None:
        if why := refusal(request, lacks=("alibi", "relative_bias")):
            return why
        if why := self.not_deterministic(request):
            return why
        if self.ops is None and isinstance(library := import_library("flash_attn.cute.interface"), str):
            return library
        capability = self.device_capability()
        if capability is None or capability[0] not in (9, 10, 11, 12):
            return "it is written for Hopper and Blackwell (compute capability 9 to 12)"
        if capability[0] == 12 and (request.softcap or request.deterministic):
            wish = "a soft cap" if request.softcap else "a deterministic backward"
            return f"on compute capability 12.x it has not {wish}"
        head, value = request.head_dim, request.value_dim or request.head_dim
        if head_sizes(head, value, capability[0]) is None:
            return f"it has no heads of {head} with values of {value} on compute capability {capability[0]}.x"
        return None

    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        V = v_mKV.shape[-1]
        D_padded, V_padded = self._head_sizes(q_nHD.shape[-1], V)
        q, k, v = padded(q_nHD, D_padded), padded(k_mKD, D_padded), padded(v_mKV, V_padded)
        out, lse_Hn, *_ = self._library()._flash_attn_fwd(q, k, v, return_lse=True, **_options(call, scores))
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
        D_padded, V_padded = self._head_sizes(D, V)
        q, k = padded(q_nHD, D_padded), padded(k_mKD, D_padded)
        dout, v, out = (padded(x.to(q.dtype), V_padded) for x in (dout_nHV, v_mKV, out_nHV))
        dq, dk, dv, *_ = self._library()._flash_attn_bwd(
            q, k, v, out, dout, to_heads(lse_nH), deterministic=self.deterministic, **_options(call, scores)
        )
        return dq[..., :D], dk[..., :D], dv[..., :V], None

    def _head_sizes(self, head_dim: int, value_dim: int) -> tuple[int, int]:
        capability = self.device_capability()
        sizes = None if capability is None else head_sizes(head_dim, value_dim, capability[0])
        if sizes is None:
            raise ConfigError(
                f"flash-attn 4 has no heads of {head_dim} with values of {value_dim} on this device "
                f"(compute capability {capability}). Try parallel.kernel=auto."
            )
        return sizes

    def _library(self) -> Any:
        library = import_library("flash_attn.cute.interface") if self.ops is None else self.ops
        if isinstance(library, str):
            raise ConfigError(f"parallel.kernel={self.name}: {library}. Try parallel.kernel=auto.")
        return library


def head_sizes(head_dim: int, value_dim: int, major: int) -> tuple[int, int] | None:
    """The query/key and value head sizes to pad to on a chip of this generation; None where none is large enough."""
    D, V = equal_head_size(head_dim, 0), equal_head_size(value_dim, 0)
    if major == 9:
        return (D, V) if max(D, V) <= 256 else None
    if max(D, V) <= 128:
        return (D, V) if major != 12 else (max(D, V), max(D, V))
    if major == 12:
        return None
    if D <= 192 and V <= 128:
        return 192, 128
    return (256, 256) if max(D, V) <= 256 else None


def _options(call: Sequences, scores: Scores) -> dict[str, Any]:
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "max_seqlen_k": call.max_seqlen_k,
        "softmax_scale": scores.scale,
        "window_size_left": None if call.left == OPEN else call.left,
        "window_size_right": None if call.right == OPEN else call.right,
        "softcap": scores.softcap or 0.0,
    }
