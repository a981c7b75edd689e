"""Choosing a kernel by what it supports."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from longctx.errors import ConfigError
from longctx.kernels.attention.blockwise import BlockwiseKernel
from longctx.kernels.attention.contract import AttentionKernel, KernelRequest
from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.flash.adapter import FlashKernel
from longctx.kernels.attention.flash.flex import FlexKernel
from longctx.kernels.attention.flash.libraries import CUDA_FLASH, FLASH2, FLASH4
from longctx.kernels.attention.reference import ReferenceKernel

log = logging.getLogger(__name__)

_PREFERRED: tuple[AttentionKernel, ...] = (
    FlashKernel(FLASH4),
    FlashKernel(FLASH2),
    # slower, and so reached by ``auto`` only where the two above refuse: they are not deterministic
    FlashKernel(FLASH4, deterministic=True),
    FlashKernel(FLASH2, deterministic=True),
    FlashKernel(CUDA_FLASH),  # where no flash-attn is installed
    FlexKernel(),  # the only one on CUDA with biases
    CpuFlashKernel(),
    BlockwiseKernel(),  # any device and any score
    ReferenceKernel(),
    CpuFlashKernel("native"),
    CpuFlashKernel("float32"),
)
KERNELS: dict[str, AttentionKernel] = {kernel.name: kernel for kernel in _PREFERRED}
"""Every kernel by name, the preferred one first: ``auto`` takes the first that supports the request. The last two
are cpu_flash for requests that say how a CPU multiplies bfloat16."""


@lru_cache(maxsize=64)
def choose_kernel(name: str, request: KernelRequest) -> AttentionKernel:
    """The kernel called ``name``, or with ``"auto"`` the first that supports the request; says once which and why.

    ConfigError when the name is unknown or the named kernel cannot serve the request.
    """
    if name == "auto":
        return _multiplying(_first_that_serves(request).name, request)
    if name not in KERNELS:
        raise ConfigError(f"parallel.kernel={name!r} is unknown. Try one of {['auto', *KERNELS]}.")
    if refusal := KERNELS[name].supports(request):
        raise ConfigError(f"parallel.kernel={name!r} cannot serve {request}: {refusal}. Try parallel.kernel=auto.")
    return _multiplying(name, request)


def _multiplying(name: str, request: KernelRequest) -> AttentionKernel:
    """The kernel of this name that multiplies bfloat16 as the request says, where it has more than one way."""
    if request.dtype == torch.bfloat16 and f"{name}_{request.products}" in KERNELS:
        return KERNELS[f"{name}_{request.products}"]
    return KERNELS[name]


def _first_that_serves(request: KernelRequest) -> AttentionKernel:
    refusals: dict[str, str] = {}
    for name, kernel in KERNELS.items():
        refusal = kernel.supports(request)
        if refusal is None:
            log.info("Attention kernel: %s for %s%s.", name, request, _passed_over(refusals))
            return kernel
        refusals[name] = refusal
    lines = "".join(f"\n  {refusal}: {name}" for name, refusal in refusals.items())
    raise ConfigError(f"no attention kernel serves {request}:{lines}")


def _passed_over(refusals: dict[str, str]) -> str:
    """Why kernels that would have been preferred were not taken, each reason once."""
    kernels_by_reason: dict[str, list[str]] = {}
    for name, refusal in refusals.items():
        kernels_by_reason.setdefault(refusal, []).append(name)
    return "".join(f"; not {', '.join(names)}: {refusal}" for refusal, names in kernels_by_reason.items())
