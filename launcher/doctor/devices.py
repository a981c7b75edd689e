"""Checks of GPUs and processor, and of their attention kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

import psutil
import torch

from launcher.doctor.finding import Finding, printable
from launcher.run_folder import processor_name
from launcher.wording import plural
from longctx.kernels.attention.contract import KernelRequest
from longctx.kernels.attention.select import KernelChoice, explain_choice
from longctx.kernels.processor import fastest_products, has_native_bfloat16

_QUERY = "name,memory.total,memory.used,driver_version"
_USED_MIB = 1024
"""Memory in use beyond this is another process: a driver and an idle desktop take a few hundred MiB."""


@dataclass(frozen=True)
class Gpu:
    """GPU as reported by nvidia-smi."""

    name: str
    total_mib: int
    used_mib: int
    driver: str


def read_gpus() -> list[Gpu]:
    """Return the GPUs that the driver shows; empty if nvidia-smi is missing or fails."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    command = [program, f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        # A broken driver is reported later: PyTorch then has no GPU.
        return []
    return parse_gpus(said)


def parse_gpus(text: str) -> list[Gpu]:
    """Parse the GPUs from nvidia-smi's CSV, skipping malformed lines."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        # Devices split into instances (MIG) have "[N/A]" as their memory in use.
        if len(fields) == 4 and fields[1].isdigit() and fields[2].isdigit():
            found.append(Gpu(printable(fields[0]), int(fields[1]), int(fields[2]), printable(fields[3])))
    return found


def check_devices(gpus: Sequence[Gpu], num_usable: int) -> list[Finding]:
    """Check the GPUs that the driver shows; PyTorch can use ``num_usable`` of them."""
    if not gpus and not num_usable:
        return [Finding.of("gpus", "none: ranks run on the CPU")]
    if not num_usable:
        value = f"the driver ({gpus[0].driver}) shows {plural(len(gpus), 'GPU')}, PyTorch {torch.__version__} uses none"
        advice = "Install PyTorch's CUDA build for this driver: pytorch.org/get-started"
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            advice = "CUDA_VISIBLE_DEVICES is empty: unset it"
        return [Finding.of("gpus", value, advice, "fail")]
    findings = [Finding.of("gpus", _gpu_summary(gpus, num_usable))]
    busy = [index for index, gpu in enumerate(gpus) if gpu.used_mib > _USED_MIB]
    if busy:
        value = ", ".join(f"GPU {index}: {gpus[index].used_mib / 1024:.1f} GiB" for index in busy)
        advice = "Another process holds this memory: see nvidia-smi, or leave these GPUs out with deepspeed --include"
        findings.append(Finding.of("gpu memory", f"in use already: {value}", advice))
    return findings


def check_processor() -> Finding:
    """Report the processor, its cores and memory, and whether it has native bfloat16 products."""
    products = "bfloat16 products in float32 (no native ones)"
    if has_native_bfloat16():
        products = "native bfloat16 products"
    memory = psutil.virtual_memory().total / 2**30
    # Cores available to this process, for example in a container or batch job, not all of the machine's.
    cores = plural(len(os.sched_getaffinity(0)), "core")
    return Finding.of("processor", f"{processor_name()}, {cores}, {memory:.0f} GiB, {products}")


def check_kernel(device_type: str) -> Finding:
    """Check the kernel that ``parallel.kernel=auto`` takes for a typical decoder; advise on installing a faster one."""
    request = KernelRequest(device_type, torch.bfloat16, 128, 32, 8, products=fastest_products())
    return describe_choice(explain_choice("auto", request), request)


def describe_choice(choice: KernelChoice, request: KernelRequest) -> Finding:
    """Return the finding of a kernel choice: a warning if a faster kernel could be installed."""
    value = f"{choice.name} ({request})"
    _, _, passed_over = choice.reason.partition("; ")
    # On a CPU only one kernel matters, and the others are rejected because there is no GPU.
    if request.device_type == "cuda" and passed_over:
        value += f"; {passed_over}"
    return Finding.of("attention", value, choice.advice or "")


def _gpu_summary(gpus: Sequence[Gpu], num_usable: int) -> str:
    cuda = f"CUDA {torch.version.cuda}"
    if not gpus:
        return f"{plural(num_usable, 'GPU')} for PyTorch, {cuda}; nvidia-smi tells nothing"
    # One name if all GPUs are of one kind.
    names = sorted({f"{gpu.name} {gpu.total_mib / 1024:.0f} GiB" for gpu in gpus})
    return f"{num_usable} × {', '.join(names)}, driver {gpus[0].driver}, {cuda}"
