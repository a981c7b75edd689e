"""Attention kernel selection: find a kernel that supports a request."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

import torch

from longctx.errors import ConfigError
from longctx.kernels.attention.blockwise import BlockwiseKernel
from longctx.kernels.attention.cpu_flash import CpuFlashKernel
from longctx.kernels.attention.flash.adapter import FlashKernel
from longctx.kernels.attention.flash.cudnn import CudnnKernel
from longctx.kernels.attention.flash.flex import FlexKernel
from longctx.kernels.attention.flash.libraries import CUDA_FLASH, FLASH2, FLASH3, FLASH4
from longctx.kernels.attention.flash.varlen import VarlenKernel
from longctx.kernels.attention.kernel_interface import AttentionKernel, KernelRequest
from longctx.kernels.attention.reference import ReferenceKernel

log = logging.getLogger(__name__)

_KERNELS: tuple[AttentionKernel, ...] = (
    FlashKernel(FLASH3),
    FlashKernel(FLASH2),
    FlashKernel(FLASH4),
    FlashKernel(FLASH2, deterministic=True),
    FlashKernel(FLASH4, deterministic=True),
    FlashKernel(CUDA_FLASH),  # if flash-attn is not installed
    CudnnKernel(),  # never chosen by ``auto``: the kernel above serves the same requests; cudnn.py gives the reasons
    FlexKernel(),  # the only one on CUDA with biases
    CpuFlashKernel(),
    BlockwiseKernel(),  # any device and any score
    ReferenceKernel(),
    CpuFlashKernel("native"),
    CpuFlashKernel("float32"),
)
KERNELS: dict[str, AttentionKernel] = {kernel.name: kernel for kernel in _KERNELS}
"""All kernels by name, in order of preference. The last two are cpu_flash variants for requests that set
``matmul_mode``.
"""

_FIRST_ON: Mapping[int, tuple[str, ...]] = {
    # Hopper: flash-attn 3 is written for it. Both here and on consumer Blackwell the release precedes the beta.
    9: ("flash3", "flash2", "flash4"),
    12: ("flash2", "flash4"),
    # Datacentre Blackwell: flash-attn 4 is written for it; flash-attn 2 treats it as an older device.
    10: ("flash4", "flash2"),
}
"""Kernels that ``auto`` tries first, per CUDA device generation (major compute capability)."""


@dataclass(frozen=True, slots=True)
class KernelChoice:
    """Kernel for a request, the reason for choosing it, and a hint for installing a faster one."""

    kernel: AttentionKernel
    reason: str
    """Log text: named by the config, or why ``auto`` skipped the kernels before it."""
    install_hint: str | None
    """Install commands for kernels that ``auto`` would prefer on this device, fastest first."""

    @property
    def name(self) -> str:
        """Name of the chosen kernel."""
        return self.kernel.name

    def __str__(self) -> str:
        if self.install_hint is None:
            return f"{self.name}: {self.reason}"
        return f"{self.name}: {self.reason}. {self.install_hint}"


def choose_kernel(name: str, request: KernelRequest) -> AttentionKernel:
    """Resolve ``name`` to a kernel, ``"auto"`` to the first that supports the request; log the choice once.

    Raise ConfigError if the name is unknown or the named kernel cannot serve the request.
    """
    return resolve_kernel(name, request).kernel


@lru_cache(maxsize=64)
def resolve_kernel(name: str, request: KernelRequest) -> KernelChoice:
    """Resolve like ``choose_kernel``, with the reason and an install hint; log the choice once."""
    if name == "auto":
        choice = _first_that_serves(request)
    elif name in KERNELS:
        if unsupported_reason := KERNELS[name].supports(request):
            raise ConfigError(
                f"parallel.kernel={name!r} does not support {request}: {unsupported_reason}. Try parallel.kernel=auto."
            )
        choice = KernelChoice(KERNELS[name], f"parallel.kernel={name!r}", None)
    else:
        raise ConfigError(f"parallel.kernel={name!r} is unknown. Try one of {['auto', *KERNELS]}.")
    choice = replace(choice, kernel=_multiplying(choice.name, request))
    log.info("Attention kernel for %s: %s", request, choice)
    return choice


def order_of_auto(generation: int | None) -> list[AttentionKernel]:
    """List all kernels in the order ``auto`` tries them on this generation (None: no CUDA device)."""
    first = _FIRST_ON.get(generation or 0, ())
    # Deterministic variants are slower: ``auto`` reaches them only if the request rules out the others.
    names = list(first) + [f"{name}_deterministic" for name in first] + list(KERNELS)
    return [KERNELS[name] for name in dict.fromkeys(names) if name in KERNELS]


def _multiplying(name: str, request: KernelRequest) -> AttentionKernel:
    """Return the kernel's variant for the requested bfloat16 matmul mode, or the kernel itself."""
    if request.dtype == torch.bfloat16 and f"{name}_{request.matmul_mode}" in KERNELS:
        return KERNELS[f"{name}_{request.matmul_mode}"]
    return KERNELS[name]


def _first_that_serves(request: KernelRequest) -> KernelChoice:
    """Return the first kernel in ``auto`` order that serves the request.

    Raise ConfigError with one line per reason if no kernel does.
    """
    refusals: dict[str, str] = {}
    for kernel in order_of_auto(device_generation()):
        unsupported_reason = kernel.supports(request)
        if unsupported_reason is None:
            reason = f"the fastest kernel that supports it{_passed_over(refusals)}"
            return KernelChoice(kernel, reason, _install_hint(request, [KERNELS[name] for name in refusals]))
        refusals[kernel.name] = unsupported_reason
    lines = "".join(f"\n  {unsupported_reason}: {name}" for name, unsupported_reason in refusals.items())
    raise ConfigError(f"no attention kernel supports {request}:{lines}")


def device_generation() -> int | None:
    """Return the CUDA device's major compute capability, as the kernels see it, if there is a device."""
    for kernel in KERNELS.values():
        if isinstance(kernel, VarlenKernel):
            capability = kernel.device_capability()
            if capability is not None:
                return capability[0]
    return None


def _install_hint(request: KernelRequest, passed_over: list[AttentionKernel]) -> str | None:
    """Return install commands for skipped kernels that only lack their library."""
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
    """Describe why preferred kernels were skipped, each reason once."""
    kernels_by_reason: dict[str, list[str]] = {}
    for name, unsupported_reason in refusals.items():
        kernels_by_reason.setdefault(unsupported_reason, []).append(name)
    return "".join(
        f"; not {', '.join(names)}: {unsupported_reason}" for unsupported_reason, names in kernels_by_reason.items()
    )
