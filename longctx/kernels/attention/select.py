"""Choice of a kernel that supports a request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from longctx.errors import ConfigError
from longctx.kernels.attention.blockwise import BlockwiseKernel
from longctx.kernels.attention.contract import AttentionKernel, KernelRequest
from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.flash.adapter import FlashKernel
from longctx.kernels.attention.flash.cudnn import CudnnKernel
from longctx.kernels.attention.flash.flex import FlexKernel
from longctx.kernels.attention.flash.libraries import CUDA_FLASH, FLASH2, FLASH3, FLASH4
from longctx.kernels.attention.flash.varlen import VarlenKernel
from longctx.kernels.attention.reference import ReferenceKernel

log = logging.getLogger(__name__)

_KERNELS: tuple[AttentionKernel, ...] = (
    FlashKernel(FLASH3),
    FlashKernel(FLASH2),
    FlashKernel(FLASH4),
    FlashKernel(FLASH2, deterministic=True),
    FlashKernel(FLASH4, deterministic=True),
    FlashKernel(CUDA_FLASH),  # if no flash-attn is installed
    CudnnKernel(),  # never by ``auto``, since the kernel before it serves the same requests; cudnn.py says why
    FlexKernel(),  # the only one on CUDA with biases
    CpuFlashKernel(),
    BlockwiseKernel(),  # any device and any score
    ReferenceKernel(),
    CpuFlashKernel("native"),
    CpuFlashKernel("float32"),
)
KERNELS: dict[str, AttentionKernel] = {kernel.name: kernel for kernel in _KERNELS}
"""Every kernel by name, in the order of preference. The last two are cpu_flash for requests that say how a CPU
multiplies bfloat16."""

_FIRST_ON: Mapping[int, tuple[str, ...]] = {
    # Hopper: flash-attn 3 is written for it. There and on consumer Blackwell the release goes before the beta.
    9: ("flash3", "flash2", "flash4"),
    12: ("flash2", "flash4"),
    # datacentre Blackwell: flash-attn 4 is written for it, flash-attn 2 runs there as on an older device
    10: ("flash4", "flash2"),
}
"""Kernels that ``auto`` tries first on a generation (major compute capability) of CUDA devices."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Kernel that serves a request, the reason for this choice, and advice on how to install a faster one."""

    kernel: AttentionKernel
    reason: str
    """For the log: that the config names it, or why the kernels before it in the order of ``auto`` were not taken."""
    advice: str | None
    """What installs kernels that ``auto`` would prefer on this device, the fastest first; None where there are none."""

    @property
    def name(self) -> str:
        """Name of the kernel."""
        return self.kernel.name

    def __str__(self) -> str:
        if self.advice is None:
            return f"{self.name}: {self.reason}"
        return f"{self.name}: {self.reason}. {self.advice}"


def choose_kernel(name: str, request: KernelRequest) -> AttentionKernel:
    """Return the kernel called ``name``, or with ``"auto"`` the first that supports the request; log the choice once.

    Raise ConfigError if the name is unknown or the named kernel cannot serve the request.
    """
    return explain_choice(name, request).kernel


@lru_cache(maxsize=64)
def explain_choice(name: str, request: KernelRequest) -> KernelChoice:
    """Return the kernel of ``choose_kernel`` with the reason and advice on a faster one; log the choice once."""
    if name == "auto":
        choice = _first_that_serves(request)
    elif name in KERNELS:
        if refusal := KERNELS[name].supports(request):
            raise ConfigError(f"parallel.kernel={name!r} cannot serve {request}: {refusal}. Try parallel.kernel=auto.")
        choice = KernelChoice(KERNELS[name], f"parallel.kernel={name!r}", None)
    else:
        raise ConfigError(f"parallel.kernel={name!r} is unknown. Try one of {['auto', *KERNELS]}.")
    choice = replace(choice, kernel=_multiplying(choice.name, request))
    log.info("Attention kernel for %s: %s", request, choice)
    return choice


def order_of_auto(generation: int | None) -> list[AttentionKernel]:
    """Return all kernels in the order in which ``auto`` tries them on this generation (None: no CUDA device)."""
    first = _FIRST_ON.get(generation or 0, ())
    # the deterministic ones are slower: ``auto`` reaches them only if the request refuses the others
    names = list(first) + [f"{name}_deterministic" for name in first] + list(KERNELS)
    return [KERNELS[name] for name in dict.fromkeys(names) if name in KERNELS]


def _multiplying(name: str, request: KernelRequest) -> AttentionKernel:
    """Return the variant of this kernel that multiplies bfloat16 as the request says, or the kernel if it has none."""
    if request.dtype == torch.bfloat16 and f"{name}_{request.products}" in KERNELS:
        return KERNELS[f"{name}_{request.products}"]
    return KERNELS[name]


def _first_that_serves(request: KernelRequest) -> KernelChoice:
    """Return the first kernel in the order of ``auto`` that serves the request.

    Raise ConfigError if there is none, with one line per reason.
    """
    refusals: dict[str, str] = {}
    for kernel in order_of_auto(device_generation()):
        refusal = kernel.supports(request)
        if refusal is None:
            reason = f"the fastest of those that serve it{_passed_over(refusals)}"
            return KernelChoice(kernel, reason, _advice(request, [KERNELS[name] for name in refusals]))
        refusals[kernel.name] = refusal
    lines = "".join(f"\n  {refusal}: {name}" for name, refusal in refusals.items())
    raise ConfigError(f"no attention kernel serves {request}:{lines}")


def device_generation() -> int | None:
    """Return the major compute capability of the CUDA device, as the kernels see it; None without a device."""
    for kernel in KERNELS.values():
        if isinstance(kernel, VarlenKernel):
            capability = kernel.device_capability()
            if capability is not None:
                return capability[0]
    return None


def _advice(request: KernelRequest, passed_over: list[AttentionKernel]) -> str | None:
    """Return how to install the skipped kernels that only lack their library to serve the request, or None."""
    commands = []
    for kernel in passed_over:
        if not isinstance(kernel, FlashKernel) or kernel.unsuited(request) is not None:
            continue
        if command := kernel.library.install:
            commands.append(f"{kernel.name} ({command})")
    if not commands:
        return None
    return f"auto would prefer {', '.join(commands)}"


def _passed_over(refusals: dict[str, str]) -> str:
    """Return why kernels that would have been preferred were not taken, each reason once."""
    kernels_by_reason: dict[str, list[str]] = {}
    for name, refusal in refusals.items():
        kernels_by_reason.setdefault(refusal, []).append(name)
    return "".join(f"; not {', '.join(names)}: {refusal}" for refusal, names in kernels_by_reason.items())
