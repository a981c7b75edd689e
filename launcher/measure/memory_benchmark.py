"""Memory and disk: size, and bandwidth for copies within the host, between host and device, and to a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch

from launcher.measure.profile_entry import ProfileEntry
from launcher.measure.rank_timer import RankTimer
from launcher.measure.sizes import BenchmarkSizes
from launcher.metrics.throughput import peak_device_flops
from longctx.kernels.memory import available_bytes
from parallel.comm.world import num_ranks
from parallel.runtime.device import device_name

_CONTEXT_BYTES = 1 << 30
"""GPU memory that a CUDA context occupies."""


def benchmark_memory(timer: RankTimer, sizes: BenchmarkSizes, folder: Path) -> Iterator[ProfileEntry]:
    """Measure device and host bytes, copies between them, copies within the host, and a file in ``folder``."""
    ranks, host = num_ranks(), available_bytes()
    yield ProfileEntry.of("host_memory_bytes", host / ranks, "free host memory per rank")
    device_bytes, description = host / ranks, "free host memory per rank"
    if timer.device.type == "cuda":
        device_bytes = torch.cuda.get_device_properties(timer.device).total_memory - _CONTEXT_BYTES
        description = "device memory, less 1 GiB for the context"
    yield ProfileEntry.of("memory_bytes", device_bytes, description)
    peak = peak_device_flops(device_name(timer.device), "bfloat16") or 0.0
    yield ProfileEntry.of("peak_flops", peak, "the bfloat16 data sheet peak; 0 means unknown")
    # Too large for any cache. A copy reads and writes every byte.
    x = torch.zeros(sizes.tensor_bytes[-1], dtype=torch.uint8)
    copied = 2 * len(x) / timer.seconds(x.clone)
    yield ProfileEntry.of("host_memory_bandwidth", copied, "copies within host memory")
    yield ProfileEntry.of("host_bandwidth", _to_host(timer, sizes.tensor_bytes[-1]), "copies to host memory")
    yield ProfileEntry.of(
        "disk_bandwidth", _file_bandwidth(timer, folder, sizes.file_bytes), "a file in the working folder"
    )


def _to_host(timer: RankTimer, num_bytes: int) -> float:
    """Measure device-to-host bytes per second; on a GPU, while as many bytes are copied back."""
    on_device, target = (torch.zeros(num_bytes, dtype=torch.uint8, device=timer.device) for _ in range(2))
    pinned = timer.device.type == "cuda"
    to, back = (torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=pinned) for _ in range(2))
    if not pinned:
        return num_bytes / timer.seconds(lambda: to.copy_(on_device))
    # Offloading uses both directions at once: saved activations are stored while others are fetched.
    streams = [torch.cuda.Stream(timer.device) for _ in range(2)]

    def both() -> None:
        with torch.cuda.stream(streams[0]):
            to.copy_(on_device, non_blocking=True)
        with torch.cuda.stream(streams[1]):
            target.copy_(back, non_blocking=True)

    return num_bytes / timer.seconds(both)


def _file_bandwidth(timer: RankTimer, folder: Path, num_bytes: int) -> float:
    """Measure bytes per second for writing a file to disk and for reading it; return the slower rate."""
    data = os.urandom(1 << 16) * (num_bytes >> 16)
    with tempfile.TemporaryFile(dir=folder, buffering=0) as file:

        def write() -> None:
            file.seek(0)
            file.write(data)
            os.fsync(file.fileno())

        def read() -> None:
            file.seek(0)
            if hasattr(os, "posix_fadvise"):
                # Drop cached pages: reading them would not measure the disk.
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            file.readall()

        # Waiting for a disk takes no CPU time, so use wall time.
        timer = RankTimer(timer.device, round_seconds=0.0)
        return num_bytes / max(timer.seconds(write), timer.seconds(read))
