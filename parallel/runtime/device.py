"""Choice of this process's device. Made before DeepSpeed is imported, which then picks its accelerator."""

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


def choose_device(wish: str, setting: str = "run.device", **degrees: int) -> torch.device:
    """Return the CPU, or the GPU with this process's local rank; ``auto`` takes GPUs if there are any.

    ``setting`` is the name of the wish in messages, and ``degrees`` are those of parallel.context and its like, by
    name, which must divide the ranks. DeepSpeed's accelerator is set too. Raise ConfigError if there are fewer GPUs
    than ranks: for ``cuda`` always, for ``auto`` if there are some, which the CPU would leave idle, unless
    DS_ACCELERATOR=cpu asks for that.
    """
    local_rank, ranks = int(os.environ.get("LOCAL_RANK", "0")), ranks_of_machine() or 1
    gpus = 0
    if wish != "cpu":
        use_expandable_segments(os.environ)
    if wish != "cpu" and torch.cuda.is_available():
        gpus = torch.cuda.device_count()
    if wish == "cuda" and gpus < ranks:
        remedy = f"Use {setting}=cpu"
        if gpus:
            remedy += f", or slots={gpus} in the hostfile"
        raise ConfigError(
            f"{setting}='cuda': this machine runs {ranks} ranks, and torch {torch.__version__} sees {gpus} GPUs here."
            f"\n{remedy}."
        )
    # The same on all ranks of a machine: a group with members on different devices has no common backend.
    if gpus < ranks:
        if gpus and os.environ.get("DS_ACCELERATOR") != "cpu":
            raise _idle_gpus(setting, ranks, gpus, degrees)
        if gpus:
            log.warning("%d ranks share %d GPUs and DS_ACCELERATOR=cpu: computing on the CPU.", ranks, gpus)
        os.environ["DS_ACCELERATOR"] = "cpu"
        keep_few_products(os.environ)
        return torch.device("cpu")
    os.environ["DS_ACCELERATOR"] = "cuda"
    torch.cuda.set_device(local_rank)
    # cuBLAS may cut a product with many terms, such as a weight's gradient over all tokens, into parts, and add these
    # in bfloat16. With this it adds them in float32, and a product in bfloat16 is rounded once, as on a CPU.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    return torch.device("cuda", local_rank)


def _idle_gpus(setting: str, ranks: int, gpus: int, degrees: Mapping[str, int]) -> ConfigError:
    """Return the error for more ranks than GPUs, with the commands that start as many, or compute on the CPU."""
    some = f"{gpus} GPU" + "s" * (gpus > 1)
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--local_rank")]
    fewer = list(arguments)
    for name, degree in degrees.items():
        # 0 means as many as there are.
        if degree and gpus % degree:
            key = f"parallel.{name}"
            fewer = [*_without(fewer, key), f"--{key}", str(math.gcd(gpus, degree))]
    on_cpu = [*_without(arguments, setting), f"--{setting.removeprefix('--')}", "cpu"]
    if environment_rank()[1] > ranks:
        first, second = f"slots={gpus} for this machine in the hostfile", f"add {shlex.join(on_cpu[-2:])}"
    else:
        first, second = start_line(gpus, fewer), start_line(ranks, on_cpu)
    return ConfigError(
        f"{setting}='auto': this machine runs {ranks} ranks and has {some}. Each rank needs a GPU of its own, and none "
        f"would be used on the CPU.\nTo compute on {some}:\n    {first}\nTo compute on the CPU:\n    {second}"
    )


def _without(arguments: list[str], key: str) -> list[str]:
    """Return the arguments without ``--key VALUE`` or ``--key=VALUE``; dashes stand for underscores."""
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
"""Environment variables that PyTorch's allocator reads when a GPU is first used; the first is their name of today."""


def use_expandable_segments(environment: MutableMapping[str, str]) -> None:
    """Let PyTorch's blocks of GPU memory grow, unless the user has set the allocator.

    Rows of other documents need tensors of other sizes in each step. Blocks of fixed size leave gaps of memory that no
    later tensor fits. Call it before a GPU is first used.
    """
    if not any(name in environment for name in _ALLOCATOR_SETTINGS):
        environment[_ALLOCATOR_SETTINGS[0]] = "expandable_segments:True"


_PRODUCTS_KEPT = 256
_PRODUCT_CACHES = ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY")
"""Environment variables that PyTorch and oneDNN read at a CPU's first product in bfloat16."""


def keep_few_products(environment: MutableMapping[str, str]) -> None:
    """Let PyTorch and oneDNN keep the code of 256 products in bfloat16, unless the user has set the numbers.

    Each size has its own code, some 0.7 MiB, and experts and documents bring new sizes in each step. By default 1024
    are kept: they were most of a small run's memory, and no step was faster. Call it before the first product.
    """
    for name in _PRODUCT_CACHES:
        environment.setdefault(name, str(_PRODUCTS_KEPT))


def device_name(device: torch.device) -> str:
    """Return the maker's name of the device; "cpu" for the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return "cpu"


def free_bytes(device: torch.device) -> int:
    """Return the bytes that this process's tensors can still get: of its GPU, or its share of this machine's memory."""
    if device.type != "cuda":
        return available_bytes() // (ranks_of_machine() or 1)
    # Memory that tensors gave back stays with the process, and serves the next ones.
    reserved = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + reserved


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes that tensors held so far on a GPU; on a CPU the largest resident set of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "darwin":
        return peak  # bytes there, KiB on Linux
    return peak * 1024
