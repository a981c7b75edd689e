"""Fresh processes that form a group, their CPU seconds and their memory."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.connection
import os
import resource
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = (
    *("parallel.attention", "deepspeed.sequence.layer", "deepspeed.runtime.sequence_parallel.ulysses_sp"),
    "torch.fx.experimental.symbolic_shapes",  # a backward pass from a given gradient imports it on first use, 30 MiB
)
"""Imported once, in the server from which workers are forked: with many ranks imports would take most of the time."""

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""glibc's constants for ``mallopt``."""


def run_ranks(
    function: Callable[..., Any],
    degree: int,
    *arguments: Any,
    timeout: float = 1800,
    preload: Sequence[str] = PRELOAD,
) -> list[Any]:
    """Return ``function(*arguments)``'s result from each of ``degree`` gloo ranks, new processes with one thread each.

    ``function`` must be a module's. RuntimeError with the traceback if one fails, or after ``timeout`` seconds. The
    server from which workers are forked imports ``preload`` when it starts, with the first call.
    """
    os.environ.update(OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu")  # read when the server starts
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(preload))
    with tempfile.TemporaryDirectory() as folder:
        settings = [(rank, degree, Path(folder), function, arguments) for rank in range(degree)]
        workers = [context.Process(target=_worker, args=s, daemon=True) for s in settings]
        for worker in workers:
            worker.start()
        try:
            _join_all(workers, timeout)
        finally:
            for worker in workers:
                worker.kill()
                worker.join()
        failures = [path.read_text() for path in sorted(Path(folder).glob("*.failed"))]
        if failures or any(worker.exitcode for worker in workers):
            codes = [worker.exitcode for worker in workers]
            raise RuntimeError("\n".join(failures) or f"{function.__name__} on {degree} ranks: exit codes {codes}")
        return [torch.load(Path(folder) / f"{rank}.result", weights_only=False) for rank in range(degree)]


def _join_all(workers: Sequence[Any], timeout: float) -> None:
    """Wait until all have ended, one has failed, or the timeout has passed."""
    deadline = time.monotonic() + timeout
    running = list(workers)
    while running and time.monotonic() < deadline and not any(worker.exitcode for worker in workers):
        multiprocessing.connection.wait([worker.sentinel for worker in running], timeout=1)
        running = [worker for worker in running if worker.exitcode is None]


def _worker(rank: int, degree: int, folder: Path, function: Callable[..., Any], arguments: tuple) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(degree), LOCAL_RANK=str(rank), LOCAL_SIZE=str(degree))
    try:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=degree)
        torch.save(function(*arguments), folder / f"{rank}.result")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        (folder / f"{rank}.failed").write_text(f"rank {rank} of {degree}:\n{traceback.format_exc()}")
        sys.exit(1)


def cpu_seconds(action: Callable[[], Any]) -> float:
    """Return this process's CPU time, over all threads, from a common start to the end of ``action``."""
    dist.barrier()
    start = time.process_time()
    action()
    return time.process_time() - start


def alternate(actions: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Return each action's CPU seconds: the minimum over rounds in which they take turns, so that noise affects all."""
    seconds = [[cpu_seconds(action) for action in actions] for _ in range(rounds)]
    return [min(of) for of in zip(*seconds, strict=True)]


def with_resident_rise(action: Callable[[], Any]) -> tuple[Any, float]:
    """Return ``action``'s result, and the increase in peak resident memory in MiB."""
    if sys.platform != "linux":  # the peak since the process's start: at most too small
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        result = action()
        unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
        return result, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / unit
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)  # reusing freed memory that is still resident would not show
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = _kibibytes("VmRSS")
    result = action()
    return result, (_kibibytes("VmHWM") - before) / 1024


def return_freed_memory() -> None:
    """Make this process return freed memory at once, if the C library supports it (glibc).

    By default glibc retains an unpredictable, growing amount: up to several MiB of unused memory.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for threshold in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            mallopt(threshold, 1 << 17)


def _kibibytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{field}:"))
