"""The folder that runs are written to, and shared memory."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from tempfile import TemporaryFile

from launcher.doctor.finding import Finding, Verdict, printable

_MIB = 2**20
_FEW_BYTES = 20 * 2**30
_CHUNK = bytes(16 * _MIB)
_MOST_CHUNKS, _MOST_SECONDS = 4, 2.0
_SLOW_BYTES_PER_SECOND = 100 * _MIB
_LITTLE_SHARED_MEMORY = 2**30


def existing_part(folder: Path) -> Path:
    """``folder`` as an absolute path, or its nearest parent that exists: nothing is made by looking."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_folder(folder: Path) -> list[Finding]:
    """Free space of a folder that exists, and how fast a file there is written, through to the disk."""
    free = shutil.disk_usage(folder).free
    size = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < len(_CHUNK) * _MOST_CHUNKS * 4:
        return [Finding(check="folder", verdict="fail", value=size, advice="Free some space, or give another --folder")]
    try:
        speed = write_speed(folder)
    except OSError as error:
        value = printable(f"{folder} cannot be written: {error.strerror}")
        return [Finding(check="folder", verdict="fail", value=value, advice="Give a --folder that you may write to")]
    # How much a run needs depends on its model, which doctor does not know.
    space = Finding(check="folder", verdict="ok", value=size)
    if free < _FEW_BYTES:
        advice = "A checkpoint holds weights, masters and moments: compare with the model, and set checkpoint.keep_last"
        space = Finding(check="folder", verdict="warn", value=size, advice=advice)
    value = f"{speed / _MIB:.0f} MiB/s of one process, to the disk"
    if speed < _SLOW_BYTES_PER_SECOND:
        advice = "Checkpoints will take long: give a faster --folder, or raise checkpoint.every_steps"
        return [space, Finding(check="write speed", verdict="warn", value=value, advice=advice)]
    return [space, Finding(check="write speed", verdict="ok", value=value)]


def write_speed(folder: Path) -> float:
    """Bytes per second of a file of at most 64 MiB, written and synced, which is gone afterwards."""
    # Without a name: nothing is left where the process is killed.
    with TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        written, seconds = 0, 0.0
        while written < _MOST_CHUNKS and seconds < _MOST_SECONDS:
            written += 1
            file.write(_CHUNK)
            # Without it the speed would be that of the machine's memory.
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    return written * len(_CHUNK) / max(seconds, 1e-9)


def check_shared_memory(num_gpus: int, folder: Path = Path("/dev/shm")) -> Finding:
    """The size of /dev/shm, through which NCCL moves data between GPUs of a machine that have no direct link."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return Finding(check="shared memory", verdict="warn", value=f"{folder} is not there", advice="Mount a tmpfs")
    value = f"{usage.total / 2**30:.1f} GiB in {folder}, {usage.free / 2**30:.1f} GiB free"
    verdict: Verdict = "ok"
    advice = ""
    # A container has 64 MiB unless told otherwise. One rank on a GPU, and gloo, take nothing of it.
    if num_gpus > 1 and usage.free < _LITTLE_SHARED_MEMORY:
        verdict, advice = (
            "warn",
            "NCCL may fail with `unhandled system error`: docker run --shm-size=1g (or --ipc=host)",
        )
    return Finding(check="shared memory", verdict=verdict, value=value, advice=advice)
