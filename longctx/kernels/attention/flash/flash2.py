"""flash-attn 2 (Ampere and newer) behind our kernel contract.

Written for the functions ``_flash_attn_varlen_forward`` and ``_flash_attn_varlen_backward`` of ``flash_attn`` 2.7 to
2.8, which take ``window_size_left`` and ``window_size_right`` and give log-sum-exps [H, n] in natural units; older
versions differ in both. Called with names, so that arguments added at the end do no harm.

Traps that stay in here:

* The kernel takes ``window_size_right >= max_seqlen_k`` for "no bound" and puts ``max_seqlen_k`` for −1 beside a bound
  on the left; both are wrong where a sequence has more queries than keys. We pass the larger of the two maxima.
* Rows without a key come back with lse = +inf; the translation lets none in.
* ALiBi under a purely causal mask is added as ``+slope·j``, so that lse is off by slope·(i + sk − sq); with a window on
  the left it is −slope·|i + sk − sq − j|. We set a window that binds nothing.
* Keys and values have one head size, a multiple of 8; smaller ones are padded with zeros.
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
from longctx.kernels.attention.flash.calls import OPEN


class Flash2Kernel(VarlenKernel):
    """Any mask, soft cap and ALiBi; bfloat16 and float16 heads up to 256."""

    base = "flash2"

    def supports(self, request: KernelRequest) -> str | None:
        if why := refusal(request, lacks=("relative_bias",)):
            return why
        if why := self.not_deterministic(request):
            return why
        if self.ops is None and isinstance(library := _library(), str):
            return library
        capability = self.device_capability()
        if capability is None or capability < (8, 0):
            return f"it needs compute capability 8.0, the device has {_dotted(capability)}"
        return None

    def call_forward(
        self, q_nHD: Tensor, k_mKD: Tensor, v_mKV: Tensor, call: Sequences, scores: Scores
    ) -> tuple[Tensor, Tensor]:
        V, size = v_mKV.shape[-1], equal_head_size(q_nHD.shape[-1], v_mKV.shape[-1])
        q, k, v = (padded(x, size) for x in (q_nHD, k_mKD, v_mKV))
        options = _options(call, scores)
        out, lse_Hn, *_ = self._library()._flash_attn_varlen_forward(q, k, v, return_softmax=False, **options)
        lse_nH = from_heads(lse_Hn)
        shift = _shift(call, scores)
        return out[..., :V], lse_nH if shift is None else lse_nH.double() - shift

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
        shift = _shift(call, scores)
        lse_Hn = to_heads(lse_nH if shift is None else lse_nH + shift)
        dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
        self._library()._flash_attn_varlen_backward(
            dout, q, k, v, out, lse_Hn, dq, dk, dv, deterministic=self.deterministic, **_options(call, scores)
        )
        return dq[..., :D], dk[..., :D], dv[..., :V], None

    def _library(self) -> Any:
        library = _library() if self.ops is None else self.ops
        if isinstance(library, str):
            raise ConfigError(f"parallel.kernel={self.name}: {library}. Try parallel.kernel=auto.")
        return library


def _library() -> Any:
    """``flash_attn``'s functions, or why they cannot be used."""
    package = import_library("flash_attn")  # flash-attn 4 alone is a package of this name without a version
    if isinstance(package, str):
        return package
    version = getattr(package, "__version__", None)
    if version is None:
        return "flash_attn (2) is not installed"
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 7):
        return f"flash_attn {version} is too old; it takes 2.7 or newer"
    return import_library("flash_attn.flash_attn_interface")


def window_of(call: Sequences, *, alibi: bool = False) -> dict[str, int]:
    """Window and lengths such that no side is taken for open that is not, nor the other way round."""
    longest = max(call.max_seqlen_q, call.max_seqlen_k)
    bounded = (call.left, call.right) != (OPEN, OPEN)
    causal = call.left == OPEN and call.right == 0
    return {
        "max_seqlen_k": longest if bounded else call.max_seqlen_k,
        "window_size_left": longest - 1 if alibi and causal else call.left,
        "window_size_right": call.right,
    }


def _options(call: Sequences, scores: Scores) -> dict[str, Any]:
    slopes = scores.alibi_slopes_H
    factors = call.slope_factors
    return {
        "cu_seqlens_q": call.cu_seqlens_q,
        "cu_seqlens_k": call.cu_seqlens_k,
        "max_seqlen_q": call.max_seqlen_q,
        "dropout_p": 0.0,
        "softmax_scale": scores.scale,
        "causal": False,  # the window says so
        "softcap": scores.softcap or 0.0,
        "alibi_slopes": None if slopes is None or factors is None else slopes.to(factors) * factors,
        **window_of(call, alibi=slopes is not None),
    }


def _shift(call: Sequences, scores: Scores) -> Tensor | None:
    """What the kernel's log-sum-exps are too large by, float64 [n, H]."""
    if scores.alibi_slopes_H is None or call.shifts_n1 is None:
        return None
    return scores.alibi_slopes_H.to(call.shifts_n1) * call.shifts_n1


def _dotted(capability: tuple[int, int] | None) -> str:
    return "none" if capability is None else "{}.{}".format(*capability)
