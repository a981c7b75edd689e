"""Checks for the run folder, its visibility on other machines, and shared memory."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from launcher.doctor.check_result import CheckResult, sanitize_line
from longctx.errors import ConfigError

_MIB = 2**20
_FEW_BYTES = 20 * 2**30
_CHUNK = bytes(16 * _MIB)
_MOST_CHUNKS, _MOST_SECONDS = 4, 2.0
_SLOW_BYTES_PER_SECOND = 100 * _MIB
_LITTLE_SHARED_MEMORY = 2**30
_PROBE_NAME = re.compile(r"\.longctx-doctor-[0-9a-f]{32}")
_MOST_PROBE_BYTES = 64


def existing_part(folder: Path) -> Path:
    """Return the absolute path to ``folder`` or its nearest existing parent, without creating any folder."""
    folder = folder.absolute()
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return folder


def check_folder(folder: Path) -> list[CheckResult]:
    """Check an existing folder's free space and its write speed, synced to disk."""
    free = shutil.disk_usage(folder).free
    size = f"{free / 2**30:.1f} GiB free in {folder}"
    if free < len(_CHUNK) * _MOST_CHUNKS * 4:
        return [CheckResult.of("folder", size, "Free some space, or give another --folder", "fail")]
    try:
        speed = write_speed(folder)
    except OSError as error:
        value = sanitize_line(f"{folder} cannot be written: {error.strerror}")
        return [CheckResult.of("folder", value, "Give a --folder that you may write to", "fail")]
    # The space that a run needs depends on its model, which doctor does not know.
    space, slow = "", ""
    if free < _FEW_BYTES:
        space = "A checkpoint holds weights, masters and moments: compare their size, and set checkpoint.keep_last"
    if speed < _SLOW_BYTES_PER_SECOND:
        slow = "Saves will be slow: give a faster --folder, or raise checkpoint.every_steps"
    value = f"{speed / _MIB:.0f} MiB/s from one process, synced to disk"
    return [CheckResult.of("folder", size, space), CheckResult.of("write speed", value, slow)]


def write_speed(folder: Path) -> float:
    """Measure bytes per second for writing and syncing a temporary file, at most 64 MiB."""
    # Unnamed, so that a killed process leaves no file.
    with TemporaryFile(dir=folder, buffering=0) as file:
        started = time.perf_counter()
        written, seconds = 0, 0.0
        while written < _MOST_CHUNKS and seconds < _MOST_SECONDS:
            written += 1
            file.write(_CHUNK)
            # Without fsync this would measure the page cache.
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
    return written * len(_CHUNK) / max(seconds, 1e-9)


def check_shared_memory(num_gpus: int, folder: Path = Path("/dev/shm")) -> CheckResult:
    """Check the size of /dev/shm, which NCCL uses between local GPUs without a direct link."""
    try:
        usage = shutil.disk_usage(folder)
    except OSError:
        return CheckResult.of("shared memory", f"{folder} is not there", "Mount a tmpfs")
    hint = ""
    # Containers have 64 MiB by default. A single GPU rank, and gloo, do not use it.
    if num_gpus > 1 and usage.free < _LITTLE_SHARED_MEMORY:
        hint = "NCCL may fail with `unhandled system error`: docker run --shm-size=1g (or --ipc=host)"
    value = f"{usage.total / 2**30:.1f} GiB in {folder}, {usage.free / 2**30:.1f} GiB free"
    return CheckResult.of("shared memory", value, hint)


# Probe file, which shows whether two machines see the same folder.


@dataclass(frozen=True)
class FolderProbe:
    """File with a random name and random content."""

    name: str
    content: str


@contextmanager
def probe_in(folder: Path) -> Iterator[FolderProbe]:
    """Create a probe for the duration of the ``with`` block. Raise OSError if the folder cannot be written."""
    probe = FolderProbe(f".longctx-doctor-{secrets.token_hex(16)}", secrets.token_hex(16))
    path = folder / probe.name
    # "x" fails if the file exists: an existing file cannot be our probe.
    with path.open("x") as file:
        file.write(probe.content)
    try:
        yield probe
    finally:
        path.unlink(missing_ok=True)


def read_probe(folder: Path, name: str) -> str | None:
    """Return the probe's content on this machine; None if it is unreadable.

    Raise ConfigError for any other file name.
    """
    if not _PROBE_NAME.fullmatch(name):
        raise ConfigError(f"{name!r} is not a doctor probe file.")
    try:
        with (folder / name).open("rb") as file:
            # Limit the size: another user may have put a large file there.
            return file.read(_MOST_PROBE_BYTES).decode("ascii", errors="replace")
    except OSError:
        return None
