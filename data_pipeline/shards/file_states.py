"""Verification records: file states with verified checksums, so that the next start need not read the files again.

They are in the user's cache folder, never with the shards: a corpus may be read-only, and a copy has its own records. A
file is read again if its size, times or inode have changed since.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from functools import cache
from pathlib import Path

import xxhash

from data_pipeline.shards.manifest import ShardEntry
from longctx.files import write_atomically
from longctx.untrusted.strict_json import read_json

FORMAT = "longctx-shard-stamps-1"

FileState = tuple[int, int, int, int]
"""Size in bytes, modification and change time in nanoseconds, inode: changed content changes at least one of these."""

_NETWORK = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "cifs", "smb", "9p", "virtiofs", "fuse.")
"""Type prefixes of network file systems, shared by several hosts."""

_LOCAL = ("ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs")
"""Local file system types, which always report the current state."""


def file_state(path: Path) -> FileState:
    """Return a file's state; raise OSError if it does not exist."""
    return _state(os.stat(path))  # noqa: PTH116, asked for every batch: pathlib takes a third more


def open_file_state(path: Path) -> FileState:
    """Return a file's state after opening it: a network file system then queries its server and not its own cache."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _state(os.fstat(handle))
    finally:
        os.close(handle)


def cheapest_state(path: Path) -> Callable[[Path], FileState]:
    """Return ``file_state`` for a file on a local file system, and ``open_file_state`` otherwise.

    ``file_state`` takes half the time, and reading a row with a few thousand tokens takes not much longer.
    """
    if _mount_of(path.stat().st_dev)[0] in _LOCAL:
        return file_state
    return open_file_state


def _state(status: os.stat_result) -> FileState:
    # Include the change time: a tool that resets the modification time cannot reset this one.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def cache_folder() -> Path:
    """Return the cache folder: ``$LONGCTX_CACHE``, ``$XDG_CACHE_HOME/longctx`` or ``~/.cache/longctx``, the first one
    set.
    """
    own = os.environ.get("LONGCTX_CACHE")
    if own:
        return Path(own)
    users = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(users) / "longctx"


def read_file_states(folder: Path, manifest_hash: str) -> dict[str, tuple[FileState, str]]:
    """Return each verified file's state and checksum by name for a shard folder; empty if unknown."""
    try:
        content = read_json(_records_file(folder, manifest_hash))
        if content["format"] != FORMAT:
            return {}
        return {file: ((size, mtime, ctime, inode), hash) for file, size, mtime, ctime, inode, hash in content["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        # These records only save work: without valid ones, everything is read again.
        return {}


def write_file_states(folder: Path, manifest_hash: str, files: list[tuple[ShardEntry, FileState]]) -> None:
    """Save the states in which these files' checksums matched; raise DataError if the cache cannot be written."""
    entries = [[entry.file, *state, entry.xxh3_128] for entry, state in files]
    content = {"format": FORMAT, "folder": str(folder.resolve()), "files": entries}
    write_atomically(_records_file(folder, manifest_hash), json.dumps(content, separators=(",", ":")).encode())


def place_of(folder: Path) -> str:
    """Return the location of a folder's bytes: equal on all hosts of a network file system, otherwise per machine."""
    device = folder.stat().st_dev
    kind, source = _mount_of(device)
    if kind.startswith(_NETWORK):
        return f"{kind} {source}"
    return f"{_machine()} device {device}"


def _records_file(folder: Path, manifest_hash: str) -> Path:
    """Return the path for a data set copy's records."""
    # The folder's inode distinguishes copies at the same path on hosts with a shared home. Machine names are not used:
    # a container gets a new name at each start.
    copy = xxhash.xxh3_64_hexdigest(f"{folder.stat().st_ino} {folder.resolve()}".encode())
    return cache_folder() / "shards" / f"{manifest_hash}-{copy}.json"


def _machine() -> str:
    """Return an identifier for this machine, shared by all its containers; the host name if the system has no other."""
    try:
        # Host names repeat if images are cloned; this random number is new at each boot.
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@cache
def _mount_of(device: int) -> tuple[str, str]:
    """Return type and source of a device's file system; two empty strings if unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return "", ""
    for line in lines:
        before, _, after = line.partition(" - ")
        if before.split()[2] == number:
            kind, source = after.split()[:2]
            return kind, source
    return "", ""
