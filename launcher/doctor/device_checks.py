"""GPU, processor and attention kernel checks."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from launcher.doctor.check_result import CheckResult, sanitize_line
from launcher.run_folder import processor_name
from launcher.wording import format_count
from longctx.kernels.attention.kernel_interface import KernelRequest
from longctx.kernels.attention.kernel_selection import KernelChoice, resolve_kernel
from longctx.kernels.processor import fastest_matmul_mode, has_native_bfloat16

_QUERY = "name,memory.total,memory.used,driver_version"
_USED_MIB = 1024
"""Memory in use beyond this belongs to another process: a driver and an idle desktop take a few hundred MiB."""


@dataclass(frozen=True)
class Gpu:
    """GPU as reported by nvidia-smi."""

    name: str
    total_mib: int
    used_mib: int
    driver: str


def read_gpus() -> list[Gpu]:
    """Return the GPUs listed by the driver; empty if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        # Not an error here: check_devices reports GPUs that PyTorch cannot use.
        return []
    return parse_gpus(output)


def parse_gpus(text: str) -> list[Gpu]:
    """Parse nvidia-smi's CSV, skipping malformed lines."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        # MIG devices report "[N/A]" as their memory in use.
        if len(fields) == 4 and fields[1].isdigit() and fields[2].isdigit():
            found.append(Gpu(sanitize_line(fields[0]), int(fields[1]), int(fields[2]), sanitize_line(fields[3])))
    return found


def check_devices(gpus: Sequence[Gpu], num_usable: int) -> list[CheckResult]:
    """Check the GPUs listed by the driver; PyTorch can use ``num_usable``."""
    if not gpus and not num_usable:
        return [CheckResult.of("gpus", "none: ranks run on the CPU")]
    # GPUs that PyTorch cannot use are a failure: ranks would run on the CPU instead.
    if not num_usable:
        value = (
            f"the driver ({gpus[0].driver}) shows {format_count(len(gpus), 'GPU')}, PyTorch "
            f"{torch.__version__} uses none"
        )
        hint = "Install PyTorch's CUDA build for this driver: pytorch.org/get-started"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            hint = "CUDA_VISIBLE_DEVICES is empty: unset it"
        return [CheckResult.of("gpus", value, hint, "fail")]
    results = [CheckResult.of("gpus", _gpu_summary(gpus, num_usable))]
    busy = [index for index, gpu in enumerate(gpus) if gpu.used_mib > _USED_MIB]
    if busy:
        value = ", ".join(f"GPU {index}: {gpus[index].used_mib / 1024:.1f} GiB" for index in busy)
        hint = "Another process uses this memory: check nvidia-smi, or leave these GPUs out with deepspeed --include"
        results.append(CheckResult.of("gpu memory", f"in use already: {value}", hint))
    return results


def check_processor() -> CheckResult:
    """Report processor, cores, memory, and native bfloat16 support."""
    bfloat16_support = "bfloat16 matmuls in float32 (no native ones)"
    if has_native_bfloat16():
        bfloat16_support = "native bfloat16 matmuls"
    memory = psutil.virtual_memory().total / 2**30
    # Cores available to this process, which a container or batch job may restrict, not all cores in the machine.
    cores = format_count(len(os.sched_getaffinity(0)), "core")
    return CheckResult.of("processor", f"{processor_name()}, {cores}, {memory:.0f} GiB, {bfloat16_support}")


def check_kernel(device_type: str) -> CheckResult:
    """Check which kernel ``parallel.kernel=auto`` selects for a typical decoder, and advise on a faster one."""
    # 32 query heads and 8 KV heads, each 128 wide.
    request = KernelRequest(device_type, torch.bfloat16, 128, 32, 8, matmul_mode=fastest_matmul_mode())
    return describe_choice(resolve_kernel("auto", request), request)


def describe_choice(choice: KernelChoice, request: KernelRequest) -> CheckResult:
    """Return a kernel choice as a check result: a warning if a faster kernel could be installed."""
    value = f"{choice.name} ({request})"
    _, _, passed_over = choice.reason.partition("; ")
    # On a CPU only one kernel matters; the others are rejected for lack of a GPU.
    if request.device_type == "cuda" and passed_over:
        value += f"; {passed_over}"
    return CheckResult.of("attention", value, choice.install_hint or "")


def _gpu_summary(gpus: Sequence[Gpu], num_usable: int) -> str:
    cuda = f"CUDA {torch.version.cuda}"
    if not gpus:
        return f"{format_count(num_usable, 'GPU')} for PyTorch, {cuda}; nvidia-smi lists no GPU"
    # One name if all GPUs are the same model.
    names = sorted({f"{gpu.name} {gpu.total_mib / 1024:.0f} GiB" for gpu in gpus})
    return f"{num_usable} × {', '.join(names)}, driver {gpus[0].driver}, {cuda}"
