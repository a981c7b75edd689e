"""Writing that leaves nothing half-written: whole files and whole folders appear at once or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import xxhash

from longctx.errors import DataError

_ADVICE = {
    errno.ENOSPC: "The disk is full: free some space or write to another disk.",
    errno.EDQUOT: "Your quota is used up: free some space or write to another disk.",
    errno.EFBIG: "The file would exceed the file size limit (see `ulimit -f`): raise it or use smaller shards.",
    errno.EACCES: "You may not write there: choose a folder of your own.",
    errno.EPERM: "You may not write there: choose a folder of your own.",
    errno.EROFS: "That file system is read-only: choose another folder.",
    errno.EEXIST: "Something already stands there: choose another path.",
    errno.ENOTEMPTY: "Something already stands there: choose another path.",
    errno.ENOTDIR: "A part of that path is a file: choose a path whose parents are folders.",
}


@contextlib.contextmanager
def explained_writes(path: Path) -> Iterator[None]:
    """Turns a failing disk under ``path`` into a ``DataError`` that says what to do."""
    try:
        yield
    except OSError as error:
        advice = _ADVICE.get(error.errno or 0, "Choose another place or mend this one.")
        raise DataError(
            f"{path} could not be written ({error.strerror or error}). Nothing is left of it.\n{advice}"
        ) from error


def write_atomically(path: Path, content: bytes) -> None:
    """Writes the file in one stroke: readers see the old content or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{_writer()}")
    with explained_writes(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_synced(temporary, content)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Writes the file and waits until the disk has it."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def staged_folder(target: Path, *, replace: bool = False) -> Iterator[Path]:
    """A temporary folder beside ``target`` that takes its name when the block ends well and vanishes when it fails.

    ``replace`` moves an existing target aside first and deletes it last, so a crash loses neither. What a killed
    process left behind is removed by the next one on the same host.
    """
    staging = target.with_name(f".{target.name}.partial.{_writer()}")
    retired = target.with_name(f".{target.name}.retired.{_writer()}")
    with explained_writes(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        staging.mkdir()
        try:
            yield staging
            if replace and target.exists():
                target.rename(retired)
            staging.rename(target)
        except BaseException:
            if retired.exists() and not target.exists():
                retired.rename(target)
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if target.exists():
                shutil.rmtree(retired, ignore_errors=True)


def hash_file(path: Path) -> str:
    """xxh3_128 of the file's bytes as 32 hex digits, read piece by piece."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _writer() -> str:
    return f"{socket.gethostname()}.{os.getpid()}"


def _remove_leftovers(target: Path) -> None:
    """Deletes partial folders of processes of this host that are gone; others may still be writing theirs."""
    prefix = f".{target.name}.partial.{socket.gethostname()}."
    for folder in target.parent.iterdir():
        pid = folder.name.removeprefix(prefix)
        if folder.name.startswith(prefix) and pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
