"""Device choice for this process. Made before DeepSpeed is imported, which then picks its accelerator."""

from __future__ import annotations

import logging
import math
import os
import resource
import shlex
import sys
from collections.abc import Mapping, MutableMapping

import torch

from longctx.errors import ConfigError
from longctx.kernels.memory import available_bytes
from parallel.runtime.launched import environment_rank, ranks_of_machine, start_line

log = logging.getLogger(__name__)


def choose_device(requested: str, setting: str = "run.device", **degrees: int) -> torch.device:
    """Return the CPU, or the GPU with this process's local rank; ``auto`` uses GPUs if there are any.

    ``setting`` names the option in messages; ``degrees`` holds parallel.context and similar degrees by name, which must
    divide the ranks. DeepSpeed's accelerator is set, too. Raise ConfigError if there are fewer GPUs than ranks: always
    for ``cuda``; for ``auto`` if there are some GPUs, which would stay idle, unless DS_ACCELERATOR=cpu requests it.
    """
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), ranks_of_machine() or 1
    gpus = 0
    if requested != "cpu":
        use_expandable_segments(os.environ)
    if requested != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    if requested == "cuda" and gpus < ranks:
        remedy = f"Use {setting}=cpu"
        if gpus:
            remedy += f", or slots={gpus} in the hostfile"
        raise ConfigError(
            f"{setting}='cuda': this machine runs {ranks} ranks, and torch {torch.__version__} sees {gpus} GPUs here."
            f"\n{remedy}."
        )
    # One choice for all ranks on a machine: a group whose members are on different devices has no common backend.
    if gpus < ranks:
        if gpus and os.environ.get("DS_ACCELERATOR") != "cpu":
            raise _idle_gpus(setting, ranks, gpus, degrees)
        if gpus:
            log.warning("%d ranks share %d GPUs and DS_ACCELERATOR=cpu: computing on the CPU.", ranks, gpus)
        os.environ["DS_ACCELERATOR"] = "cpu"
        limit_matmul_caches(os.environ)
        return torch.device("cpu")
    os.environ["DS_ACCELERATOR"] = "cuda"
    torch.cuda.set_device(local_rank)
    # cuBLAS may split a matmul with a long reduction dim, such as a weight gradient over all tokens, and add the parts
    # in bfloat16. This forces float32 accumulation, so that a bfloat16 matmul rounds once, as on a CPU.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device("cuda", local_rank)


def _idle_gpus(setting: str, ranks: int, gpus: int, degrees: Mapping[str, int]) -> ConfigError:
    """Build the error for more ranks than GPUs, with commands for fewer ranks or for the CPU."""
    some = f"{gpus} GPU" + "s" * (gpus > 1)
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    fewer = list(arguments)
    for name, degree in degrees.items():
        # 0 means as many as available.
        if degree and gpus % degree:
            key = f"parallel.{name}"
            fewer = [*_without(fewer, key), f"--{key}", str(math.gcd(gpus, degree))]
    on_cpu = [*_without(arguments, setting), f"--{setting.removeprefix('--')}", "cpu"]
    if environment_rank()[1] > ranks:
        first, second = f"slots={gpus} for this machine in the hostfile", f"add {shlex.join(on_cpu[-2:])}"
    else:
        first, second = start_line(gpus, fewer), start_line(ranks, on_cpu)
    return ConfigError(
        f"{setting}='auto': this machine runs {ranks} ranks and has {some}. Each rank needs its own GPU, and a CPU run "
        f"would leave the GPUs idle.\nTo compute on {some}:\n    {first}\nTo compute on the CPU:\n    {second}"
    )


def _without(arguments: list[str], key: str) -> list[str]:
    """Return the arguments without ``--key VALUE`` or ``--key=VALUE``; dashes equal underscores."""
    flag, rest, skip = f"--{key.removeprefix('--')}", [], False
    for argument in arguments:
        name, _, value = argument.partition("=")
        if skip:
            skip = False
        elif name.replace("-", "_") == flag.replace("-", "_"):
            skip = not value
        else:
            rest.append(argument)
    return rest


_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Environment variables that PyTorch's allocator reads on first GPU use; the first is the current name."""


def use_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Enable expandable allocator segments, unless the user has configured the allocator.

    Different documents need different tensor sizes in each step, and fixed-size blocks leave gaps that no later tensor
    fits. Call it before first GPU use.
    """
    if not any(name in environment for name in _ALLOCATOR_SETTINGS):
        environment[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


_MATMUL_CACHE_SIZE = 256
_MATMUL_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables that PyTorch and oneDNN read at the first bfloat16 matmul on a CPU."""


def limit_matmul_caches(environment: MutableMapping[str, str]) -> None:
    """Limit PyTorch's and oneDNN's caches to 256 compiled bfloat16 matmuls, unless the user has set the limits.

    Each matmul size has its own code, some 0.7 MiB, and experts and documents bring new sizes in each step. The default
    of 1024 took most of a small run's memory, and no step was faster. Call it before the first matmul.
    """
    for name in _MATMUL_CACHES:
        environment.setdefault(name, str(_MATMUL_CACHE_SIZE))


def device_name(device: torch.device) -> str:
    """Return the vendor's device name; "cpu" for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "cpu"


def free_device_bytes(device: torch.device) -> int:
    """Return the bytes still available to this process: on its GPU, or as its portion of the machine's memory."""
    if device.type != "cuda":
        return available_bytes() // (ranks_of_machine() or 1)
    # Memory freed by tensors stays reserved by the process and is reused.
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak tensor bytes so far on a GPU; on a CPU the process's peak resident set size."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # bytes there, KiB on Linux
    return peak * 1024
