"""Stamps: file states of shards whose checksums were verified, so that the next start need not read them again.

They are in the user's cache folder, never with the shards: a corpus may be read-only, and a copy of it has its own
stamps. A file whose size, times or inode have changed since is read again.
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
from longctx.untrusted.reading import read_json

FORMAT = "longctx-shard-stamps-1"

FileState = tuple[int, int, int, int]
"""Size in bytes, modification and change time in nanoseconds, inode: another content has another one of these."""

_NETWORK = ("nfs", "lustre", "ceph", "gpfs", "beegfs", "glusterfs", "cifs", "smb", "9p", "virtiofs", "fuse.")
"""How the types of file systems begin that several hosts see."""

_LOCAL = ("ext2", "ext3", "ext4", "f2fs", "tmpfs", "xfs")
"""Types of file systems that answer for their own disk or memory, always with what is there now."""


def file_state(path: Path) -> FileState:
    """Return the state of a file; raise OSError if there is none."""
    return _state(os.stat(path))  # noqa: PTH116, asked for every batch: pathlib takes a third more


def opened_state(path: Path) -> FileState:
    """Return the state of an opened file: a network file system then asks its server, not its own cache."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return _state(os.fstat(handle))
    finally:
        os.close(handle)


def cheapest_state(path: Path) -> Callable[[Path], FileState]:
    """Return ``file_state`` for a file on a local file system, otherwise ``opened_state``.

    The first takes half the time of the second, and reading a row of a few thousand tokens takes not much longer.
    """
    if _mount_of(path.stat().st_dev)[0] in _LOCAL:
        return file_state
    return opened_state


def _state(status: os.stat_result) -> FileState:
    # The change time too: a tool that resets the modification time cannot reset this one.
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino


def cache_folder() -> Path:
    """Return the folder of stamps: ``$LONGCTX_CACHE``, else ``$XDG_CACHE_HOME/longctx``, else ``~/.cache/longctx``."""
    own = os.environ.get("LONGCTX_CACHE")
    if own:
        return Path(own)
    users = os.environ.get("XDG_CACHE_HOME") or str(Path("~/.cache").expanduser())
    return Path(users) / "longctx"


def read_stamps(folder: Path, manifest_hash: str) -> dict[str, tuple[FileState, str]]:
    """Return state and checksum of each stamped file of a shard folder, by name; empty if there are none."""
    try:
        content = read_json(_stamp_file(folder, manifest_hash))
        if content["format"] != FORMAT:
            return {}
        return {file: ((size, mtime, ctime, inode), hash) for file, size, mtime, ctime, inode, hash in content["files"]}
    except (OSError, ValueError, KeyError, TypeError):
        # Stamps only save work: without them, or with damaged ones, everything is read again.
        return {}


def write_stamps(folder: Path, manifest_hash: str, files: list[tuple[ShardEntry, FileState]]) -> None:
    """Save the states in which these files' checksums were right; raise DataError if the cache cannot be written."""
    listed = [[entry.file, *state, entry.xxh3_128] for entry, state in files]
    content = {"format": FORMAT, "folder": str(folder.resolve()), "files": listed}
    write_atomically(_stamp_file(folder, manifest_hash), json.dumps(content, separators=(",", ":")).encode())


def place_of(folder: Path) -> str:
    """Return the location of a folder's bytes: equal on all hosts of a network file system, otherwise per machine."""
    device = folder.stat().st_dev
    kind, source = _mount_of(device)
    if kind.startswith(_NETWORK):
        return f"{kind} {source}"
    return f"{_machine()} device {device}"


def _stamp_file(folder: Path, manifest_hash: str) -> Path:
    """Return the stamp file, one for each copy of a data set."""
    # The folder's inode distinguishes copies at the same path on hosts with a shared home. Machine names are not used:
    # a container has another name at each start.
    copy = xxhash.xxh3_64_hexdigest(f"{folder.stat().st_ino} {folder.resolve()}".encode())
    return cache_folder() / "shards" / f"{manifest_hash}-{copy}.json"


def _machine() -> str:
    """Return an identifier of this machine, shared by all its containers; its host name if the system has no other."""
    try:
        # Names repeat if images are cloned; this number is drawn when a machine starts.
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


@cache
def _mount_of(device: int) -> tuple[str, str]:
    """Return type and source of the file system on a device; two empty strings if unknown."""
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
