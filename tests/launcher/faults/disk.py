"""File systems in memory, as small as a test wants them."""

from __future__ import annotations

import subprocess
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
