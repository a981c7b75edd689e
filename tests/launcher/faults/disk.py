"""File systems as small as a test wants them: in memory, and ext4 in a file, which can fail as a disk does."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Disk:
    """A mounted tmpfs."""

    folder: Path

    def remount(self, mode: str) -> None:
        """``ro`` or ``rw``."""
        subprocess.run(["mount", "-o", f"remount,{mode}", str(self.folder)], check=True, timeout=30)


_SHUTDOWN, _WITHOUT_JOURNAL = 0x8004587D, 2
"""ext4's ioctl by which it ends as if the machine had lost its power, and what is not on the disk is not written."""


@dataclass(frozen=True)
class FailingDisk:
    """A mounted ext4."""

    image: Path
    folder: Path

    def fail(self) -> str:
        """A shell command by which it fails: what was not synced is lost."""
        opened = f"os.open({str(self.folder)!r}, os.O_RDONLY)"
        arguments = f"{opened}, {_SHUTDOWN}, struct.pack('I', {_WITHOUT_JOURNAL})"
        code = f"import fcntl, os, struct; fcntl.ioctl({arguments})"
        return shlex.join([sys.executable, "-c", code])

    def mount(self) -> None:
        """Mount it, again after it has failed."""
        subprocess.run(["mount", "-o", "loop", str(self.image), str(self.folder)], check=True, timeout=30)

    def unmount(self) -> None:
        """Lazily: a process that is still ending may have a file open."""
        subprocess.run(["umount", "--lazy", str(self.folder)], check=True, timeout=30)


@contextmanager
def failing_disk(image: Path, folder: Path) -> Iterator[FailingDisk]:
    """One of 64 MiB in a folder; skips where none may be."""
    folder.mkdir(parents=True, exist_ok=True)
    with image.open("wb") as file:
        file.truncate(64 << 20)
    disk = FailingDisk(image, folder)
    try:
        subprocess.run(["mkfs.ext4", "-q", str(image)], check=True, capture_output=True, timeout=60)
        disk.mount()
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs mkfs.ext4 and the right to mount a file: {error}")
    try:
        yield disk
    finally:
        disk.unmount()


@contextmanager
def small_disk(folder: Path, size: str, *, wanted: bool = True) -> Iterator[Disk]:
    """One of so many bytes (as mount writes it) in a folder, unless it is not ``wanted``; skips where none may be."""
    folder.mkdir(parents=True, exist_ok=True)
    if not wanted:
        yield Disk(folder)
        return
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, timeout=30, check=False)
    if mounted.returncode:
        pytest.skip(f"needs the right to mount a small tmpfs: {mounted.stderr.strip()}")
    try:
        yield Disk(folder)
    finally:
        # Lazily: a process that is still ending may have a file open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True, timeout=30)
