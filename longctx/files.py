"""Writing that leaves nothing half-written: whole files and whole folders appear at once or not at all.

Beside it, what is read of files without opening them: hashes, and where a run's checkpoints are.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import xxhash

from longctx.errors import ConfigError, DataError, LongCtxError
from longctx.untrusted.reading import NOT_FETCHED, NotFetchedError, check_fetched, parse_json, read_bounded

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""Folder of a run that holds its checkpoints."""

_SMALL_MANIFEST_BYTES, _MOST_MANIFEST_BYTES = 16 * 2**20, 2**30
_SMALL_MANIFEST_VALUES = 500_000
_MOST_TOML_BYTES = 4 * 2**20
"""Of a file that people write."""

_COMMITTED = re.compile(r"step_(\d{6,})")

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
def explained_writes(
    path: Path, error: type[LongCtxError] = DataError, *, kept: str = "Nothing is left of it."
) -> Iterator[None]:
    """Turn a failing disk under ``path`` into an ``error`` that says what to do; ``kept`` says what is there still."""
    try:
        yield
    except OSError as refusal:
        advice = _ADVICE.get(refusal.errno or 0, "Choose another path or mend this one.")
        raise error(f"{path} could not be written ({refusal.strerror or refusal}). {kept}\n{advice}") from refusal


def write_atomically(path: Path, content: bytes, error: type[LongCtxError] = DataError) -> None:
    """Write the file in one stroke: readers see the old content or the new, never a part."""
    with explained_writes(path, error):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as temporary:
            temporary.write_bytes(content)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside ``path``; the file written there takes its name, synced, when the block ends well.

    What the system refuses stays an OSError.
    """
    # Beside the target, because a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{_writer()}.tmp")
    try:
        yield temporary
        # On the disk before the rename: after a power cut the name must not lead to an empty file.
        sync_path(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write the file and wait until the disk has it."""
    path.write_bytes(content)
    sync_path(path)


def sync_path(path: Path) -> None:
    """Have the system put a file's or folder's content on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def staged_folder(target: Path, *, replace: bool = False, error: type[LongCtxError] = DataError) -> Iterator[Path]:
    """Yield a temporary folder beside ``target`` that takes its name, synced, when the block ends well, else vanishes.

    ``replace`` moves an existing target aside first and deletes it last, so a crash loses neither; without it, a target
    that holds anything is an ``error``. What a killed process left behind is removed by the next one on the same host.
    """
    staging = target.with_name(f".{target.name}.partial.{_writer()}")
    retired = target.with_name(f".{target.name}.retired.{_writer()}")
    with explained_writes(target, error):
        if not replace:
            check_free(target, error)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        staging.mkdir()
        try:
            yield staging
            for path in staging.rglob("*"):
                sync_path(path)
            sync_path(staging)
            # Two renames, and between them no target: the exception below puts the old one back.
            if replace and target.exists():
                target.rename(retired)
            staging.rename(target)
            sync_path(target.parent)
        except BaseException:
            if retired.exists() and not target.exists():
                retired.rename(target)
            raise
        finally:
            shutil.rmtree(staging, ignore_errors=True)
            if target.exists():
                shutil.rmtree(retired, ignore_errors=True)


def check_free(target: Path, error: type[LongCtxError]) -> None:
    """Raise unless there is nothing at ``target`` but an empty folder."""
    is_empty_folder = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if (target.exists() or target.is_symlink()) and not is_empty_folder:
        raise error(f"{target} already exists and is not an empty folder. Name another output, or remove it.")


def check_link(folder: Path, file: str, error: type[LongCtxError] = DataError) -> None:
    """``error`` for a file of a folder that is a link out of it, or to nothing.

    A folder may come from a stranger: what it links to must not travel on under its own name. A Hugging Face cache
    stores every file as a link into its own blobs, so such links are fine.
    """
    allowed = [(folder.resolve() / file).parent, folder.resolve()]
    # The folder may be named by a link of the user's own.
    for spelling in (folder.absolute(), folder.resolve()):
        if spelling.parent.name == "snapshots":
            allowed.append((spelling.parents[1] / "blobs").resolve())
    try:
        target = (folder / file).resolve()
    except (OSError, RuntimeError) as refusal:
        # A link that leads to itself.
        raise error(f"{folder / file} cannot be followed: {refusal}.") from refusal
    if target.parent not in allowed:
        raise error(f"{folder / file} leads out of its folder, to {target}. Copy the file instead.")
    if not target.exists():
        raise error(f"{folder / file} is missing.")


def read_manifest_json(folder: Path) -> Any:
    """The value of a checkpoint's manifest, nothing in it checked; OSError or ValueError where it cannot be read."""
    content, most_values = read_manifest_bytes(folder)
    return parse_json(content, most_values=most_values)


def read_manifest_bytes(folder: Path) -> tuple[bytes, int]:
    """The text of a checkpoint's manifest, and how many values it may have; OSError or ValueError as above.

    Each piece is named in the manifest and, in about as many bytes, in the header of its file: a manifest larger than
    twice the folder's other files describes no checkpoint, whoever wrote it.
    """
    if (folder / MANIFEST).is_symlink():
        check_link(folder, MANIFEST)
    beside = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
    most_bytes = min(_SMALL_MANIFEST_BYTES + 2 * beside, _MOST_MANIFEST_BYTES)
    # A piece takes some 130 bytes and has four values.
    return read_bounded(folder / MANIFEST, most_bytes), _SMALL_MANIFEST_VALUES + most_bytes // 20


def read_toml(path: Path, called: str) -> dict[str, Any]:
    """The values of a TOML file; ConfigError, which calls it ``called``, where it cannot be read or is none."""
    try:
        return tomllib.loads(read_bounded(path, _MOST_TOML_BYTES).decode())
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror or error}.") from error
    except NotFetchedError as error:
        raise ConfigError(f"{called} {str(error).removeprefix('it ')}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{called} is not UTF-8 text, as TOML is.") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{called} is not TOML: {error}.") from error


def wrong_size(path: Path, num_bytes: int) -> str:
    """Return what is wrong with a file that is not as long as its manifest says: a sentence without its subject."""
    try:
        # One that cannot be read has the wrong size all the same.
        with contextlib.suppress(OSError):
            check_fetched(path)
    except NotFetchedError:
        return NOT_FETCHED
    return f"has {path.stat().st_size} bytes, the manifest says {num_bytes}"


def hash_file(path: Path) -> str:
    """xxh3_128 of the file's bytes as 32 hex digits, read piece by piece."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def list_checkpoints(run_folder: str | Path) -> list[Path]:
    """Committed checkpoints of a run, oldest first: folders ``checkpoints/step_NNNNNN`` that have a manifest."""
    steps: list[tuple[int, Path]] = []
    for path in (Path(run_folder) / CHECKPOINTS).glob("step_*"):
        # Not ``step_000100.discarded``, and no folder that somebody has begun to copy.
        match = _COMMITTED.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            steps.append((int(match[1]), path))
    # By number, not by name: seven digits come after six.
    return [path for _, path in sorted(steps)]


def _writer() -> str:
    """Host and process, so that two writers of one target never share a temporary name."""
    return f"{socket.gethostname()}.{os.getpid()}"


def _remove_leftovers(target: Path) -> None:
    """Delete partial folders of processes of this host that are gone; others may still be writing theirs."""
    prefix = f".{target.name}.partial.{socket.gethostname()}."
    for folder in target.parent.iterdir():
        pid = folder.name.removeprefix(prefix)
        if folder.name.startswith(prefix) and pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Whether this host has such a process. Signal 0 asks without sending anything."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # It runs, as another user.
        return True
    return True
