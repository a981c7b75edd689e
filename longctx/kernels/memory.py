"""This process's memory: its limit, page-locking, and returning freed pages to the system."""

from __future__ import annotations

import ctypes
import resource
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

_FILES = {
    "memory.max": ("memory.current", "inactive_file"),
    "memory.limit_in_bytes": ("memory.usage_in_bytes", "total_inactive_file"),
}
"""Per cgroup limit file (versions 2 and 1): its usage file, and the ``memory.stat`` key for reclaimable page cache."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for all the process's devices."""


_PLUGGED = ("bus/virtio/drivers/virtio_mem/virtio*", "bus/vmbus/drivers/hv_balloon/*-*")
"""Devices that hot-plug memory into a virtual machine."""
_WITHOUT_LIMIT = 1 << 60


def available_bytes(
    proc: Path = Path("/proc"),
    groups: Path = Path("/sys/fs/cgroup"),
    *,
    with_growth: bool = False,
    system: Path = Path("/sys"),
) -> int:
    """Return the bytes this process can still allocate: the machine's, or its control groups' if that is less.

    In a container not all the machine's memory is available: the kernel kills a process that exceeds the group's limit.
    ``with_growth`` adds memory that a virtual machine's host may still provide.
    """
    free = psutil.virtual_memory().available
    if with_growth:
        free += pluggable_bytes(proc, system)
    for folder in _group_folders(proc, groups):
        free = min(free, _left_in_group(folder, free))
    return free


def pluggable_bytes(proc: Path = Path("/proc"), system: Path = Path("/sys")) -> int:
    """Return the bytes by which this machine's memory may grow: those a balloon holds.

    If memory can be plugged in, return a very large number. Return 0 on a machine that does not report growth, even if
    its memory can grow.
    """
    if any(next(system.glob(device), None) is not None for device in _PLUGGED):
        return _WITHOUT_LIMIT
    try:
        counts = dict(line.split() for line in (proc / "vmstat").read_text().splitlines())
    except (OSError, ValueError):
        return 0
    # in pages: taken by the host, less those given back
    pages = int(counts.get("balloon_inflate", 0)) - int(counts.get("balloon_deflate", 0))
    return max(0, pages) * resource.getpagesize()


def _group_folders(proc: Path, groups: Path) -> Iterator[Path]:
    """Yield the folders for this process's groups and their parents, in both cgroup versions."""
    try:
        lines = (proc / "self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    # a container sees its own group as the root, whatever its path is outside
    names = {line.split(":", 2)[2].strip("/") for line in lines if line.count(":") >= 2}
    for name in sorted(names | {""}):
        inner = Path(name)
        for part in (inner, *inner.parents):
            yield groups / part
            yield groups / "memory" / part


def _left_in_group(folder: Path, otherwise: int) -> int:
    """Return the bytes a group may still allocate; ``otherwise`` if it has no limit."""
    for limit_file, (used_file, cached) in _FILES.items():
        try:
            limit = (folder / limit_file).read_text().strip()
            used = int((folder / used_file).read_text())
            stats = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        # "max" means no limit
        if limit.isdigit():
            return max(0, int(limit) - used + int(stats.get(cached, 0)))
    return otherwise


def lock_pages(x: Tensor, device: torch.device) -> Callable[[], None]:
    """Page-lock a CPU tensor's memory, so that a GPU copies to and from it at full speed during computation.

    Return a function that unlocks it; call that before freeing the memory. Raise RuntimeError if the system allows no
    more page-locked memory.
    """
    # A new thread starts on device 0, which another rank computes on. Only the tensor's own memory is locked: PyTorch's
    # pinned allocator would round up to a power of two.
    with torch.cuda.device(device):
        cudart: Any = torch.cuda.cudart()
        torch.cuda.check_error(cudart.cudaHostRegister(x.data_ptr(), x.nbytes, _PORTABLE))
    return partial(cudart.cudaHostUnregister, x.data_ptr())


def trim_heap() -> None:
    """Return freed heap pages to the system, if the C library supports it (glibc)."""
    # The library keeps such pages between memory in use, a little more after each large computation. The call takes
    # milliseconds, longer if much was freed: pages needed again are faulted in again.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
