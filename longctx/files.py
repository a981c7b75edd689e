"""Atomic writes: complete files and folders appear at once or not at all.

Also reads facts about files without parsing them: hashes, and the locations of a run's checkpoints.
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
from longctx.untrusted.strict_json import NOT_FETCHED, NotFetchedError, check_fetched, parse_json, read_bounded, shown

MANIFEST = "manifest.json"
CHECKPOINTS = "checkpoints"
"""Subfolder for a run's checkpoints."""

_SMALL_MANIFEST_BYTES, _MOST_MANIFEST_BYTES = 16 * 2**20, 2**30
_SMALL_MANIFEST_VALUES = 500_000
_MOST_TOML_BYTES = 4 * 2**20
"""For a file that people write."""

_STEP_FOLDER = re.compile(r"step_(\d{6,})")

_HINTS = {
    errno.ENOSPC: "The disk is full: free some space or write to another disk.",
    errno.EDQUOT: "Your quota is used up: free some space or write to another disk.",
    errno.EFBIG: "The file would exceed the file size limit (see `ulimit -f`): raise it or use smaller shards.",
    errno.EACCES: "Write permission is missing: choose a folder that you own.",
    errno.EPERM: "Write permission is missing: choose a folder that you own.",
    errno.EROFS: "That file system is read-only: choose another folder.",
    errno.EEXIST: "The path already exists: choose another one.",
    errno.ENOTEMPTY: "The path already exists: choose another one.",
    errno.ENOTDIR: "A parent in that path is a file: choose a path with folders as parents.",
}


@contextlib.contextmanager
def convert_write_errors(
    path: Path, error: type[LongCtxError] = DataError, *, kept: str = "No partial output remains."
) -> Iterator[None]:
    """Turn a disk error under ``path`` into an ``error`` with a hint; ``kept`` describes the files that remain."""
    try:
        yield
    except OSError as refusal:
        hint = _HINTS.get(refusal.errno or 0, "Choose another path or repair this one.")
        raise error(f"{path} could not be written ({refusal.strerror or refusal}). {kept}\n{hint}") from refusal


def write_atomically(path: Path, content: bytes, error: type[LongCtxError] = DataError) -> None:
    """Write the file atomically: readers see either the old content or the new."""
    with convert_write_errors(path, error):
        path.parent.mkdir(parents=True, exist_ok=True)
        with replaced_file(path) as temporary:
            temporary.write_bytes(content)


@contextlib.contextmanager
def replaced_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to ``path``; on success, sync the file written there and rename it to ``path``.

    System errors stay OSErrors.
    """
    # next to the target, because a rename is only atomic within one file system
    temporary = path.with_name(f".{path.name}.{_writer()}.tmp")
    try:
        yield temporary
        # Sync before the rename: after a power failure the name must not refer to an empty file.
        sync_path(temporary)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write_synced(path: Path, content: bytes) -> None:
    """Write the file and wait until it is on disk."""
    path.write_bytes(content)
    sync_path(path)


def sync_path(path: Path) -> None:
    """Flush a file's or folder's content to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def staged_folder(target: Path, *, replace: bool = False, error: type[LongCtxError] = DataError) -> Iterator[Path]:
    """Yield a temporary folder next to ``target``; on success sync and rename it to ``target``, otherwise remove it.

    ``replace`` moves an existing target aside first and deletes it last, so a crash loses neither; without it, a
    non-empty target is an ``error``. A killed process's leftovers are removed by the next one on the same host.
    """
    staging = target.with_name(f".{target.name}.partial.{_writer()}")
    retired = target.with_name(f".{target.name}.retired.{_writer()}")
    with convert_write_errors(target, error):
        if not replace:
            check_target_free(target, error)
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        staging.mkdir()
        try:
            yield staging
            for path in staging.rglob("*"):
                sync_path(path)
            sync_path(staging)
            # Two renames leave a moment without a target: if the second fails, the handler below restores the old one.
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


def check_target_free(target: Path, error: type[LongCtxError]) -> None:
    """Raise an error unless ``target`` does not exist or is an empty folder."""
    is_empty_folder = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if (target.exists() or target.is_symlink()) and not is_empty_folder:
        raise error(f"{target} already exists and is not an empty folder. Name another output, or remove it.")


def check_link(folder: Path, file: str, error: type[LongCtxError] = DataError) -> None:
    """Raise ``error`` if a file in a folder is a link out of it, or a dangling link.

    A folder may be untrusted: a link's target must not be copied under the link's name. A Hugging Face cache stores
    every file as a link into its own blobs, so such links are allowed.
    """
    allowed = [(folder.resolve() / file).parent, folder.resolve()]
    # the user may have named the folder by a link
    for base in (folder.absolute(), folder.resolve()):
        if base.parent.name == "snapshots":
            allowed.append((base.parents[1] / "blobs").resolve())
    try:
        target = (folder / file).resolve()
    except (OSError, RuntimeError) as refusal:
        # a link to itself
        raise error(f"{folder / file} cannot be resolved: {refusal}.") from refusal
    if target.parent not in allowed:
        raise error(f"{folder / file} links outside of its folder, to {target}. Copy the file instead.")
    if not target.exists():
        raise error(f"{folder / file} is missing.")


def read_manifest_json(folder: Path) -> Any:
    """Parse a checkpoint's manifest without checking it; raise OSError or ValueError if it cannot be read."""
    content, most_values = read_manifest_bytes(folder)
    return parse_json(content, most_values=most_values)


def read_manifest_bytes(folder: Path) -> tuple[bytes, int]:
    """Return a checkpoint's manifest text and its value limit; raise OSError or ValueError if it cannot be read."""
    if (folder / MANIFEST).is_symlink():
        check_link(folder, MANIFEST)
    # A manifest larger than twice the folder's other files cannot describe a checkpoint: each tensor slice takes about
    # as many bytes in its file's header.
    safetensors_bytes = sum(path.stat().st_size for path in folder.glob("*.safetensors") if path.is_file())
    most_bytes = min(_SMALL_MANIFEST_BYTES + 2 * safetensors_bytes, _MOST_MANIFEST_BYTES)
    # a slice takes some 130 bytes and has four values
    return read_bounded(folder / MANIFEST, most_bytes), _SMALL_MANIFEST_VALUES + most_bytes // 20


def read_toml(path: Path, called: str) -> dict[str, Any]:
    """Read a TOML file; raise ConfigError with the name ``called`` if it cannot be read or parsed."""
    text = ""
    try:
        text = read_bounded(path, _MOST_TOML_BYTES).decode()
        return tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"{called} cannot be read: {error.strerror or error}.") from error
    except NotFetchedError as error:
        raise ConfigError(f"{called} {str(error).removeprefix('it ')}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{called} is not UTF-8 text, which TOML requires.") from error
    except (ValueError, RecursionError) as error:
        # tomllib reports the line number, but not the line
        place = re.search(r"at line (\d+)", str(error))
        line = ""
        if place:
            bad_line = text.split("\n")[int(place[1]) - 1]
            line = f" That line is {shown(bad_line)}."
        raise ConfigError(f"{called} is not TOML: {error}.{line}") from error


def size_problem(path: Path, num_bytes: int) -> str:
    """Describe a file that does not have its manifest entry's size, as a sentence without its subject."""
    try:
        # if it cannot be read, its size is still wrong
        with contextlib.suppress(OSError):
            check_fetched(path)
    except NotFetchedError:
        return NOT_FETCHED
    return f"has {path.stat().st_size} bytes, but {num_bytes} in the manifest"


def hash_file(path: Path) -> str:
    """Return the xxh3_128 over the file's bytes as 32 hex digits, reading 4 MiB at a time."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def list_checkpoints(run_folder: str | Path) -> list[Path]:
    """List a run's committed checkpoints, oldest first: folders ``checkpoints/step_NNNNNN`` with a manifest."""
    steps: list[tuple[int, Path]] = []
    for path in (Path(run_folder) / CHECKPOINTS).glob("step_*"):
        # excludes ``step_000100.discarded``, and folders that are still being copied
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            steps.append((int(match[1]), path))
    # numerically, not by name: seven digits sort after six
    return [path for _, path in sorted(steps)]


def _writer() -> str:
    """Return host and process, so that two writers for one target never share a temporary name."""
    return f"{socket.gethostname()}.{os.getpid()}"


def _remove_leftovers(target: Path) -> None:
    """Delete partial folders from dead processes on this host; live processes may still be writing theirs."""
    prefix = f".{target.name}.partial.{socket.gethostname()}."
    for folder in target.parent.iterdir():
        pid = folder.name.removeprefix(prefix)
        if folder.name.startswith(prefix) and pid.isdecimal() and not _is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(pid: int) -> bool:
    """Return whether this process exists on this host. Signal 0 checks without sending anything."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        # it runs, as another user
        return True
    return True
