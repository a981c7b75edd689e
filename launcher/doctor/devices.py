"""GPU, processor and attention kernel checks."""

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
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        # Not an error here: check_devices reports GPUs that PyTorch cannot use.
        return []
    return parse_gpus(said)


def parse_gpus(text: str) -> list[Gpu]:
    """Parse nvidia-smi's CSV, skipping malformed lines."""
    found = []
    for line in text.splitlines():
        fields = [field.strip() for field in line.split(",")]
        # MIG devices report "[N/A]" as their memory in use.
        if len(fields) == 4 and fields[1].isdigit() and fields[2].isdigit():
            found.append(Gpu(printable(fields[0]), int(fields[1]), int(fields[2]), printable(fields[3])))
    return found


def check_devices(gpus: Sequence[Gpu], num_usable: int) -> list[Finding]:
    """Check the GPUs listed by the driver; PyTorch can use ``num_usable``."""
    if not gpus and not num_usable:
        return [Finding.of("gpus", "none: ranks run on the CPU")]
    # GPUs that PyTorch cannot use are a failure: ranks would run on the CPU instead.
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
    """Report processor, cores, memory, and native bfloat16 support."""
    products = "bfloat16 products in float32 (no native ones)"
    if has_native_bfloat16():
        products = "native bfloat16 products"
    memory = psutil.virtual_memory().total / 2**30
    # Cores available to this process, which a container or batch job may restrict, not all cores in the machine.
    cores = plural(len(os.sched_getaffinity(0)), "core")
    return Finding.of("processor", f"{processor_name()}, {cores}, {memory:.0f} GiB, {products}")


def check_kernel(device_type: str) -> Finding:
    """Check which kernel ``parallel.kernel=auto`` selects for a typical decoder, and advise on a faster one."""
    # 32 query heads and 8 KV heads, each 128 wide.
    request = KernelRequest(device_type, torch.bfloat16, 128, 32, 8, products=fastest_products())
    return describe_choice(explain_choice("auto", request), request)


def describe_choice(choice: KernelChoice, request: KernelRequest) -> Finding:
    """Return a kernel choice as a check result: a warning if a faster kernel could be installed."""
    value = f"{choice.name} ({request})"
    _, _, passed_over = choice.reason.partition("; ")
    # On a CPU only one kernel matters; the others are rejected for lack of a GPU.
    if request.device_type == "cuda" and passed_over:
        value += f"; {passed_over}"
    return Finding.of("attention", value, choice.advice or "")


def _gpu_summary(gpus: Sequence[Gpu], num_usable: int) -> str:
    cuda = f"CUDA {torch.version.cuda}"
    if not gpus:
        return f"{plural(num_usable, 'GPU')} for PyTorch, {cuda}; nvidia-smi tells nothing"
    # One name if all GPUs are the same model.
    names = sorted({f"{gpu.name} {gpu.total_mib / 1024:.0f} GiB" for gpu in gpus})
    return f"{num_usable} × {', '.join(names)}, driver {gpus[0].driver}, {cuda}"
