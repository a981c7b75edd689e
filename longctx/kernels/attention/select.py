"""Choosing a kernel by what it supports."""

from __future__ import annotations

import logging
from functools import lru_cache

from torch import Tensor

from longctx.errors import ConfigError
from longctx.kernels.attention.blockwise import BlockwiseKernel
from longctx.kernels.attention.contract import AttentionKernel, KernelRequest, Scores
from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.flash.cuda_flash import CudaFlashKernel
from longctx.kernels.attention.flash.flash2 import Flash2Kernel
from longctx.kernels.attention.flash.flash3 import Flash3Kernel
from longctx.kernels.attention.flash.flash4 import Flash4Kernel
from longctx.kernels.attention.flash.flex import FlexKernel
from longctx.kernels.attention.reference import ReferenceKernel

log = logging.getLogger(__name__)

_PREFERRED: tuple[AttentionKernel, ...] = (
    Flash3Kernel(),  # Hopper only, where it is the fastest
    Flash4Kernel(),
    Flash2Kernel(),
    Flash3Kernel(deterministic=True),
    Flash4Kernel(deterministic=True),
    Flash2Kernel(deterministic=True),
    CudaFlashKernel(),
    FlexKernel(),
    CpuFlashKernel(),
    BlockwiseKernel(),
    ReferenceKernel(),
)
KERNELS: dict[str, AttentionKernel] = {kernel.name: kernel for kernel in _PREFERRED}
"""Every kernel by name, the preferred one first: ``auto`` takes the first that supports the request."""


def kernel_request(
    q_BtHD: Tensor,
    k_BsKD: Tensor,
    v_BsKV: Tensor | None = None,
    scores: Scores | None = None,
    *,
    window: bool = False,
    deterministic: bool = False,
) -> KernelRequest:
    """What these tensors, scores and masks ask of a kernel; values like keys and plain scores where none are given."""
    return KernelRequest(
        q_BtHD.device.type,
        q_BtHD.dtype,
        q_BtHD.shape[-1],
        q_BtHD.shape[2],
        k_BsKD.shape[2],
        value_dim=None if v_BsKV is None else v_BsKV.shape[-1],
        window=window,
        softcap=scores is not None and scores.softcap is not None,
        alibi=scores is not None and scores.alibi_slopes_H is not None,
        relative_bias=scores is not None and scores.relative_bias is not None,
        deterministic=deterministic,
    )


@lru_cache(maxsize=64)
def choose_kernel(name: str, request: KernelRequest) -> AttentionKernel:
    """The kernel called ``name``, or with ``"auto"`` the first that supports the request; says once which and why.

    ConfigError when the name is unknown or the named kernel cannot serve the request.
    """
    if name == "auto":
        refusals = {k: kernel.supports(request) for k, kernel in KERNELS.items()}
        chosen = next((k for k, refusal in refusals.items() if refusal is None), None)
        if chosen is None:
            raise ConfigError(f"no attention kernel serves {request}: {refusals}.")
        log.info("Attention kernel: %s for %s%s.", chosen, request, _passed_over(refusals, chosen))
        return KERNELS[chosen]
    if name not in KERNELS:
        raise ConfigError(f"parallel.kernel={name!r} is unknown. Try one of {['auto', *KERNELS]}.")
    if refusal := KERNELS[name].supports(request):
        raise ConfigError(f"parallel.kernel={name!r} cannot serve {request}: {refusal}. Try parallel.kernel=auto.")
    return KERNELS[name]


def _passed_over(refusals: dict[str, str | None], chosen: str) -> str:
    """Why kernels that would have been preferred were not taken, each reason once."""
    kernels_by_reason: dict[str, list[str]] = {}
    for name, why in refusals.items():
        if name == chosen:
            break
        kernels_by_reason.setdefault(why or "", []).append(name)
    return "".join(f"; not {', '.join(names)}: {why}" for why, names in kernels_by_reason.items())
