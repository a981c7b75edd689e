"""Local copies of shard folders that cannot be mapped in place: those in an object store, or packed.

Manifest and tokenizer are fetched when the folder is opened, and each shard when it is first used. If several processes
share a cache, one fetches a shard and the others wait. A shard gets its name only once it is complete and its checksum
matches, so interrupted transfers are never read, and the next start continues with the missing shards.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast

import xxhash
import zstandard

from data_pipeline.shards.block_checksum import RECOVERY_HINT, checksum_file
from data_pipeline.shards.file_states import cache_folder
from data_pipeline.shards.manifest import MANIFEST_FILE, REFERENCES_FILE, Manifest, ShardEntry
from data_pipeline.shards.shard_compression import PACKED_FILE, CompressedFolder, CompressedShard
from data_pipeline.stores.client import list_names
from data_pipeline.stores.urls import Location, ObjectPath, locate
from longctx.errors import DataError
from longctx.files import convert_write_errors, replaced_file, write_atomically
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.load_tokenizer import has_tokenizer, is_tokenizer_file

_READ_BYTES = 16 << 20
_MIN_FREE_BYTES = 1 << 28
"""Minimum free space on the cache's disk: a completely full disk would fail the next process that writes."""


class LocalCopy:
    """Local copy of one folder; see ``open_folder``."""

    def __init__(self, origin: Location, folder: Path, manifest: Manifest, packing: CompressedFolder | None) -> None:
        self.origin, self.folder = origin, folder
        self._manifest, self._packing = manifest, packing

    def missing(self) -> list[ShardEntry]:
        """Return the shards not fetched yet."""
        return [entry for entry in self._manifest.shards if not self._is_fetched(entry)]

    def check_free_space(self) -> None:
        """Raise DataError if the cache's disk cannot hold all missing shards."""
        self._check_free_space(sum(entry.bytes for entry in self.missing()))

    def fetch(self, entry: ShardEntry) -> None:
        """Fetch a shard and its block checksums unless present; raise DataError if its origin is missing or damaged."""
        if self._is_fetched(entry):
            return
        path = self.folder / entry.file
        with convert_write_errors(path), _alone(path) as is_alone:
            # Another process may have fetched it in the meantime.
            if self._is_fetched(entry):
                return
            if is_alone:
                # Left by killed processes: only the holder of the lock writes here.
                for leftover in self.folder.glob(f".{entry.file}.*.tmp"):
                    leftover.unlink()
            self._check_free_space(entry.bytes)
            # Fetch checksums first, because the shard's presence implies both.
            if entry.sums:
                self._fetch_checksum_file(entry)
            with replaced_file(path) as temporary:
                self._receive(entry, temporary)

    def drop(self, entry: ShardEntry) -> None:
        """Remove a shard and its block checksums from the copy."""
        for name in (entry.file, checksum_file(entry.file)):
            (self.folder / name).unlink(missing_ok=True)

    def lend_to(self, manifest: Manifest) -> None:
        """Start the copy for another manifest of the same origin with hard links to the shards present here."""
        folder = _copy_of(self.origin, manifest, self.folder.parent)
        folder.mkdir(exist_ok=True)
        for entry in manifest.shards:
            for name in (entry.file, checksum_file(entry.file)):
                if (self.folder / name).is_file() and not (folder / name).exists():
                    os.link(self.folder / name, folder / name)

    def extra_files(self) -> list[str]:
        """Return shards and checksum files in the origin that are not listed."""
        return extra_files(self.origin, self._manifest, self._packing)

    def _is_fetched(self, entry: ShardEntry) -> bool:
        try:
            # A truncated file is fetched again.
            return (self.folder / entry.file).stat().st_size == entry.bytes
        except FileNotFoundError:
            return False

    def _check_free_space(self, size: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if size + _MIN_FREE_BYTES > free:
            raise DataError(
                f"{self.origin} needs {size / 1e9:,.1f} GB more on this host, but the disk of {self.folder} has only "
                f"{max(0, free - _MIN_FREE_BYTES) / 1e9:,.1f} GB available.\nSet data.cache or LONGCTX_CACHE to a "
                f"folder on a larger disk, or remove unused copies from {self.folder.parent}."
            )

    def _fetch_checksum_file(self, entry: ShardEntry) -> None:
        source = self.origin / checksum_file(entry.file)
        content = _read(source)
        if xxhash.xxh3_128_hexdigest(content) != entry.sums:
            raise DataError(f"{source} is damaged: its checksum does not match {MANIFEST_FILE}. {RECOVERY_HINT}")
        write_atomically(self.folder / source.name, content)

    def _receive(self, entry: ShardEntry, to: Path) -> None:
        """Write a shard's bytes, unpacked, into ``to``; raise DataError if they do not match the manifest."""
        packed = None
        if self._packing is not None:
            packed = self._packing.of(entry.file)
        source = self.origin / (packed.file if packed is not None else entry.file)
        digest, size = xxhash.xxh3_128(), 0
        try:
            with source.open("rb") as raw, to.open("wb") as sink:
                for block in _blocks(raw, packed, source):
                    size += len(block)
                    # The file was swapped for another, which could have any size.
                    if size > entry.bytes:
                        break
                    digest.update(block)
                    sink.write(block)
        except FileNotFoundError as error:
            raise _missing_error(source) from error
        if (size, digest.hexdigest()) != (entry.bytes, entry.xxh3_128):
            raise DataError(f"{source} is damaged: its checksum does not match {MANIFEST_FILE}. {RECOVERY_HINT}")


def open_folder(
    folder: str | Path | ObjectPath, cache: str | Path | None = None
) -> tuple[Path, Manifest, LocalCopy | None]:
    """Return the path to map a shard folder at, its manifest, and its ``LocalCopy``; None if it is mapped in place.

    Copies are stored in ``cache``, by default ``data`` in the user's cache folder: one per URL and manifest, so that
    replaced data gets a new copy. Raises DataError if the folder cannot be read.
    """
    origin = locate(folder)
    packing = None
    if isinstance(origin, Path):
        if not (origin / PACKED_FILE).is_file():
            return origin, Manifest.load(origin), None
        # Different names for one folder share a copy.
        origin = origin.resolve()
    manifest = Manifest.load(origin)
    if (origin / PACKED_FILE).is_file():
        packing = CompressedFolder.load(origin, manifest)
    home = copies_folder()
    if cache:
        home = Path(cache)
    copy = _copy_of(origin, manifest, home)
    with convert_write_errors(copy):
        copy.mkdir(parents=True, exist_ok=True)
        with _alone(copy / MANIFEST_FILE):
            if not (copy / MANIFEST_FILE).is_file():
                _begin(origin, copy, manifest)
    return copy, manifest, LocalCopy(origin, copy, manifest, packing)


def _copy_of(origin: Location, manifest: Manifest, home: Path) -> Path:
    """Return the path to an origin's copy under this manifest."""
    return home / f"{origin.name}-{xxhash.xxh3_64_hexdigest(f'{origin} {manifest.hash}'.encode())}"


def fetch_folder(folder: str | Path | ObjectPath, cache: str | Path | None = None) -> Path:
    """Return the path to a complete shard folder: the folder itself, or its copy with all shards fetched."""
    found, _, copy = open_folder(folder, cache)
    if copy is not None:
        copy.check_free_space()
        for entry in copy.missing():
            copy.fetch(entry)
    return found


def copies_folder() -> Path:
    """Return the default folder for copies: ``data`` in the user's cache folder."""
    return cache_folder() / "data"


def has_folder(folder: str | Path | ObjectPath) -> bool:
    """Return whether a shard folder exists here, local or in a store."""
    return (locate(folder) / MANIFEST_FILE).is_file()


def extra_files(folder: Location, manifest: Manifest, packing: CompressedFolder | None = None) -> list[str]:
    """Return unlisted shards and checksum files in a folder, which are never read: a sign of two mixed folders."""
    known = {entry.file for entry in (manifest if packing is None else packing).shards}
    known |= {checksum_file(entry.file) for entry in manifest.shards if entry.sums}
    known |= manifest.files_left_out | {REFERENCES_FILE}
    return [name for name in _names(folder) if name.endswith((".arrow", ".zst", ".sums")) and name not in known]


def _begin(origin: Location, copy: Path, manifest: Manifest) -> None:
    """Fetch all small files, with the manifest last to mark the others as complete."""
    for name in _names(origin):
        if is_tokenizer_file(name):
            write_atomically(copy / name, _read(origin / name))
    # Check the tokenizer here, where the error can name the origin; a missing one is reported on use.
    if has_tokenizer(copy):
        try:
            is_right = load_tokenizer(copy).fingerprint == manifest.tokenizer
        except DataError:
            is_right = False
        if not is_right:
            shutil.rmtree(copy)
            raise DataError(f"{origin}: the tokenizer does not match these shards. Restore the original.")
    write_atomically(copy / MANIFEST_FILE, manifest.content())


def _names(folder: Location) -> list[str]:
    """Return the names directly inside a folder."""
    if isinstance(folder, ObjectPath):
        return list_names(folder)
    return sorted(path.name for path in folder.iterdir())


def _read(path: Location) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        raise _missing_error(path) from error


def _missing_error(path: Location) -> DataError:
    return DataError(f"{path} is missing, though {MANIFEST_FILE} lists it. {RECOVERY_HINT}")


def _blocks(raw: BinaryIO, packed: CompressedShard | None, source: Location) -> Iterator[bytes]:
    """Yield a shard's bytes; raise DataError if a packed file does not match its checksum."""
    if packed is None:
        while block := raw.read(_READ_BYTES):
            yield block
        return
    mismatch = DataError(f"{source} is damaged: its checksum does not match {PACKED_FILE}. {RECOVERY_HINT}")
    hashed = _Hashed(raw)
    # Decompress buffer by buffer: 64 KiB of zstd can expand to 2 GiB, and the consumer stops at the shard's size.
    unpacked = zstandard.ZstdDecompressor().stream_reader(cast(BinaryIO, hashed), read_size=1 << 16, closefd=False)
    try:
        while block := unpacked.read(_READ_BYTES):
            yield block
    except (zstandard.ZstdError, EOFError) as error:
        raise mismatch from error
    # Also hash bytes after the last frame, which do not change the unpacked data.
    while hashed.read(_READ_BYTES):
        pass
    if hashed.digest.hexdigest() != packed.xxh3_128:
        raise mismatch


class _Hashed:
    """File that is hashed while it is read."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw, self.digest = raw, xxhash.xxh3_128()

    def read(self, count: int) -> bytes:
        """Return at most the next ``count`` bytes."""
        piece = self._raw.read(count)
        self.digest.update(piece)
        return piece


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Wait until no other process fetches this file; yield True if this is certain."""
    lock = path.with_name(f".{path.name}.lock")
    handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        is_alone = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
        except OSError:
            # A file system without locks: several processes may fetch the same shard, each into its own file.
            is_alone = False
        yield is_alone
        # Waiting processes find the shard when they acquire the lock.
        lock.unlink(missing_ok=True)
    finally:
        os.close(handle)
