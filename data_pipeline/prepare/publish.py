"""Sends a shard folder to a store, or packs it: shards first, the manifest last.

Readers see no folder in the store before all files have arrived. The local folder records the files that have arrived,
so that an interrupted transfer continues.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from data_pipeline.prepare.left_out import LEFT_OUT_FILE
from data_pipeline.shards.block_checksum import checksum_file
from data_pipeline.shards.file_states import cache_folder
from data_pipeline.shards.manifest import (
    LIST_OF_BEFORE,
    MANIFEST_FILE,
    REFERENCES_FILE,
    VALIDATION_FOLDER,
    Manifest,
    hash_json,
)
from data_pipeline.shards.shard_compression import DEFAULT_LEVEL, LEVELS, PACKED_FILE, CompressedFolder, compress_shard
from data_pipeline.stores.client import list_objects, remove, upload
from data_pipeline.stores.urls import ObjectPath, locate
from longctx.errors import DataError
from longctx.files import hash_file, staged_folder, write_atomically
from longctx.tokenizer.load_tokenizer import is_tokenizer_file

_SENT_FILE = ".sent.json"
_SHARD_FILE = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,120}\.(arrow|arrow\.zst|sums|lengths)")

Say = Callable[[str], None]


def transfer_folder(to: ObjectPath) -> Path:
    """Return the cache folder for preparing a transfer to this location; it is removed after the transfer."""
    return cache_folder() / "outgoing" / hash_json(str(to))


def pack_folder(
    folder: Path, output: str | Path | ObjectPath, *, level: int = DEFAULT_LEVEL, overwrite: bool, say: Say
) -> int:
    """Write a packed shard folder, locally or in a store, and return its shards' bytes.

    Readers treat it like any other folder: each shard is unpacked into the cache at first use. Raises DataError if the
    folder is damaged.
    """
    if level not in LEVELS:
        raise DataError(f"level={level} must be from {LEVELS[0]} to {LEVELS[-1]}. Try {DEFAULT_LEVEL}.")
    if (folder / PACKED_FILE).is_file():
        raise DataError(f"{folder} is already packed. Copy it unchanged.")
    place = locate(output)
    if not isinstance(place, ObjectPath):
        with staged_folder(place, replace=overwrite and (place / MANIFEST_FILE).is_file()) as staging:
            return _pack_into(folder, staging, level=level, say=say)
    check_output_free(place, overwrite=overwrite)
    ready = transfer_folder(place) / f"{Manifest.load(folder).hash}-{level}"
    # Present already if an earlier transfer was interrupted.
    if not (ready / MANIFEST_FILE).is_file():
        with staged_folder(ready) as staging:
            _pack_into(folder, staging, level=level, say=say)
    size = sum(path.stat().st_size for path in ready.rglob("*.zst"))
    send(ready, place, overwrite=overwrite, say=say)
    shutil.rmtree(transfer_folder(place), ignore_errors=True)
    return size


def check_output_free(to: ObjectPath, *, overwrite: bool) -> None:
    """Raise DataError if a store contains unrelated files there, or a complete shard folder unless ``overwrite``."""
    remote_sizes = list_objects(to)
    other_files = [name for name in remote_sizes if not _is_ours(name)]
    if other_files:
        raise DataError(
            f"output={to} contains {other_files[0]}, which does not belong to a shard folder. Name another one."
        )
    if MANIFEST_FILE in remote_sizes and not overwrite:
        raise DataError(f"output={to} is already a shard folder. Replace it with --overwrite, or name another one.")


def send(folder: Path, to: ObjectPath, *, overwrite: bool, say: Say) -> None:
    """Send a shard folder to a store; raise DataError if the location contains other files, or the store refuses.

    Files already sent by an earlier transfer of the same folder are kept.
    """
    with _transfer_lock(folder, to):
        # Commit protocol: delete old manifests, send shards and lists, send manifests last. A folder without a manifest
        # is not a shard folder, so readers see the old folder, none, or the new one, but never a mixture.
        check_output_free(to, overwrite=overwrite)
        remote_sizes = list_objects(to)
        journal = _Journal(folder / _SENT_FILE, str(to))
        sent = {name: size for name, size in journal.sent.items() if remote_sizes.get(name) == size}
        # Delete manifests first, so that readers stop before their files are replaced.
        for name in sorted(remote_sizes.keys() - sent.keys(), key=lambda name: not name.endswith(MANIFEST_FILE)):
            remove(_object(to, name))
        names = _names_in_order(folder)
        for number, name in enumerate(names, start=1):
            size = (folder / name).stat().st_size
            # Skip files that an interrupted transfer of the same bytes has sent.
            if sent.get(name) != size:
                upload(folder / name, _object(to, name))
                journal.note(name, size)
                say(f"sent {name} to {to} ({number} of {len(names)})")
        # List the store again: this detects a second writer.
        remote_sizes = list_objects(to)
        for name in names:
            if remote_sizes.get(name) != (folder / name).stat().st_size:
                raise DataError(
                    f"{to}/{name} differs from the file that was sent: another process may write there. Send it again."
                )
        journal.path.unlink(missing_ok=True)


@contextlib.contextmanager
def _transfer_lock(folder: Path, to: ObjectPath) -> Iterator[None]:
    """Hold a lock that keeps other processes on this host from sending the folder; raise DataError if one does."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise DataError(f"{to} is being sent by another process on this host. Wait for it, or stop it.") from error
    finally:
        os.close(handle)


class _Journal:
    """Record of files sent from a folder, so that an interrupted transfer continues."""

    def __init__(self, path: Path, to: str) -> None:
        self.path = path
        # Valid only for the same bytes: the manifest covers all other files, and a packed folder's list covers its own.
        file_hashes = [hash_file(file) for file in sorted(path.parent.rglob("*.json")) if file != path]
        self._of = hash_json([to, file_hashes])
        self.sent: dict[str, int] = {}
        with contextlib.suppress(OSError, ValueError):
            record = json.loads(path.read_bytes())
            if record["of"] == self._of:
                self.sent = record["sent"]

    def note(self, name: str, size: int) -> None:
        """Record one more file that has arrived."""
        self.sent[name] = size
        write_atomically(self.path, json.dumps({"of": self._of, "sent": self.sent}).encode())


def _pack_into(folder: Path, staging: Path, *, level: int, say: Say) -> int:
    """Write the packed folder and its validation split into ``staging``; return all shards' bytes."""
    size = 0
    for split in (Path(), Path(VALIDATION_FOLDER)):
        if not (folder / split / MANIFEST_FILE).is_file():
            continue
        manifest = Manifest.load(folder / split)
        (staging / split).mkdir(exist_ok=True)
        packed = []
        for number, entry in enumerate(manifest.shards, start=1):
            path = folder / split / entry.file
            # Otherwise damage would be copied under new, valid checksums.
            if not path.is_file() or hash_file(path) != entry.xxh3_128:
                raise DataError(f"{path} is missing or damaged. Run `longctx data verify {folder}` for details.")
            packed.append(compress_shard(path, staging / split / f"{entry.file}.zst", level=level))
            say(f"packed {split / entry.file} ({number} of {len(manifest.shards)})")
        names = [checksum_file(entry.file) for entry in manifest.shards if entry.sums]
        names += [path.name for path in (folder / split).iterdir() if is_tokenizer_file(path.name)]
        for name in (*names, LEFT_OUT_FILE, REFERENCES_FILE, MANIFEST_FILE):
            if (folder / split / name).is_file():
                shutil.copyfile(folder / split / name, staging / split / name)
        packing = CompressedFolder(manifest=manifest.hash, shards=packed)
        (staging / split / PACKED_FILE).write_bytes(json.dumps(packing.to_json(), indent=2).encode() + b"\n")
        size += sum(entry.bytes for entry in packed)
    return size


def _names_in_order(folder: Path) -> list[str]:
    """Return every file in a shard folder, validation split first, and each split's manifest last."""
    found = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
    ours = [name for name in found if _is_ours(name)]
    return sorted(ours, key=lambda name: ("/" not in name, name.endswith(MANIFEST_FILE), name))


def _is_ours(name: str) -> bool:
    """Return whether a shard folder may contain a file at this relative path."""
    own = name.removeprefix(f"{VALIDATION_FOLDER}/")
    known = (MANIFEST_FILE, PACKED_FILE, LEFT_OUT_FILE, REFERENCES_FILE, LIST_OF_BEFORE)
    return own in known or is_tokenizer_file(own) or _SHARD_FILE.fullmatch(own) is not None


def _object(folder: ObjectPath, name: str) -> ObjectPath:
    for part in name.split("/"):
        folder = folder / part
    return folder
