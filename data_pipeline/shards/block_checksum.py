"""Block checksums: one per 64 KiB of a shard, so that a read verifies only the blocks that it touches.

``NNNNN.sums``, stored next to ``NNNNN.arrow``, has the xxh3_64 of each block as little-endian uint64; the last block
may be shorter. The manifest contains the xxh3_128 of this file, and its own hash covers that. Folders from older
releases have no block checksums.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
from pathlib import Path

import numpy as np
import pyarrow as pa
import xxhash

from data_pipeline.shards.manifest import MANIFEST_FILE, ShardEntry
from longctx.errors import DataError
from longctx.files import check_link
from longctx.untrusted.strict_json import read_bounded

BLOCK_SHIFT = 16
BLOCK_BYTES = 1 << BLOCK_SHIFT
"""Checksum block size, fixed by the format."""

RECOVERY_HINT = (
    "Copy the shard again, or build the folder again (`longctx data build` as before with --overwrite writes the same "
    "bytes). Or leave the shard out (`longctx data build --without`) and start a new run from the checkpoint's weights "
    "(run.start_from)."
)

_MOST_SUMS_BYTES = 256 * 2**20
"""Size for a shard of 2 TiB."""
_READ_BYTES = 64 * BLOCK_BYTES
# Available since Linux 5.14; Python's mmap has no name for it yet.
_POPULATE_READ = 22
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def checksum_file(shard: str) -> str:
    """Return the name of a shard's checksum file: ``00000.sums`` for ``00000.arrow``."""
    return Path(shard).with_suffix(".sums").name


def checksum_blocks(path: Path) -> tuple[str, np.ndarray]:
    """Return a file's xxh3_128 as 32 hex digits, and its blocks' xxh3_64 checksums, uint64, in one read."""
    whole, sums = xxhash.xxh3_128(), []
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            whole.update(piece)
            view = memoryview(piece)
            sums += [
                xxhash.xxh3_64_intdigest(view[start : start + BLOCK_BYTES])
                for start in range(0, len(piece), BLOCK_BYTES)
            ]
    return whole.hexdigest(), np.array(sums, np.dtype("<u8"))


def read_checksum_file(folder: Path, entry: ShardEntry) -> np.ndarray:
    """Return a shard's block checksums, uint64; raise DataError unless they match the manifest."""
    path = folder / checksum_file(entry.file)
    try:
        if path.is_symlink():
            check_link(folder, path.name)
        content = read_bounded(path, _MOST_SUMS_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, though {MANIFEST_FILE} lists its checksum. {RECOVERY_HINT}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}). {RECOVERY_HINT}") from error
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}. {RECOVERY_HINT}") from error
    if xxhash.xxh3_128_hexdigest(content) != entry.sums:
        raise DataError(f"{path} is damaged: its checksum does not match {MANIFEST_FILE}. {RECOVERY_HINT}")
    # A matching checksum is not enough: another file's checksums would be compared with the wrong blocks.
    if len(content) != 8 * -(-entry.bytes // BLOCK_BYTES):
        raise DataError(
            f"{path} has {len(content)} bytes, which do not match a shard of {entry.bytes}. {RECOVERY_HINT}"
        )
    return np.frombuffer(content, np.dtype("<u8"))


# Verified reads without reading a shard twice: the checksums form a two-level hash tree (manifest → checksum file → 64
# KiB blocks), so a read of n bytes costs the hash of at most n + 128 KiB instead of the complete shard. Invariant:
# ``seen[b] == 1`` only after block b has matched its checksum in this mapping. ``seen`` only ever goes from 0 to 1, and
# verifying a block twice is harmless, so threads need no lock.
class ChecksumBlocks:
    """Checksum blocks in one mapped file, with the set of verified ones. Threads may share it.

    Each block is verified when any byte of it is first used, and only then. Without checksums, no block is verified.
    """

    def __init__(self, content: pa.Buffer, sums: np.ndarray | None, path: Path) -> None:
        self._content, self._view = content, memoryview(content)
        self._sums, self._path = None, path
        count = -(-content.size // BLOCK_BYTES)
        # One byte per block: setting a byte is atomic across threads, and ``find`` runs in C.
        self.seen = bytearray(count)
        """1 for each verified block."""
        if sums is not None:
            # Plain integers come from a memory view, faster than from an array.
            self._sums = sums.astype(np.uint64).data
        else:
            self.seen = bytearray(b"\1") * count
        self._seen_view = np.frombuffer(self.seen, np.uint8)
        self.all_seen = sums is None
        """True once all blocks are verified, so that reads can skip the search."""

    def check(self, start: int, stop: int) -> None:
        """Raise DataError if a checksum block that contains any of these bytes is damaged."""
        first, last = start >> BLOCK_SHIFT, (stop + BLOCK_BYTES - 1) >> BLOCK_SHIFT
        if self.seen.find(0, first, last) >= 0:
            self._read(first, last)

    def check_items(self, starts: np.ndarray, size: int) -> None:
        """Verify the checksum blocks of items with ``size`` bytes each, which start at ``starts`` [n], int64."""
        blocks = np.unique(np.concatenate([starts >> BLOCK_SHIFT, (starts + size - 1) >> BLOCK_SHIFT]))
        blocks = blocks[self._seen_view[blocks] == 0]
        # Verify adjacent blocks together, so that the system reads them in one request.
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):
            if len(run):
                self._read(int(run[0]), int(run[-1]) + 1)

    def _read(self, first: int, last: int) -> None:
        """Verify the checksum blocks from ``first`` to ``last`` (exclusive) that are not verified yet."""
        assert self._sums is not None
        stop, prefetched_end = min(last << BLOCK_SHIFT, self._content.size), 0
        number = self.seen.find(0, first, last)
        while number >= 0:
            begin = number << BLOCK_SHIFT
            # Prefetch a few blocks at a time: prefetched data must still be in memory when it is hashed.
            if begin >= prefetched_end:
                prefetched_end = min(begin + _READ_BYTES, stop)
                self._prefetch(begin, prefetched_end)
            end = begin + BLOCK_BYTES
            if xxhash.xxh3_64_intdigest(self._view[begin:end]) != self._sums[number]:
                raise checksum_error(self._path, begin, min(end, stop))
            self.seen[number] = 1
            number = self.seen.find(0, number + 1, last)
        self.all_seen = self.seen.find(0) < 0

    def _prefetch(self, begin: int, end: int) -> None:
        """Read these bytes into memory; raise DataError if accessing them would kill the process with a signal."""
        part = self._content.slice(begin, end - begin)
        advise(part, mmap.MADV_WILLNEED)
        # If the kernel does not support this, pages are faulted in on access.
        if advise(part, _POPULATE_READ) or ctypes.get_errno() != errno.EFAULT:
            return
        if end - begin > BLOCK_BYTES:
            # Retry block by block to find the one that fails.
            for start in range(begin, end, BLOCK_BYTES):
                self._prefetch(start, min(start + BLOCK_BYTES, end))
            return
        raise DataError(
            f"{self._path} cannot be read from byte {begin:,} to {end:,}: the disk failed, or the file was cut short. "
            f"{RECOVERY_HINT}"
        )


def checksum_error(path: Path, begin: int, end: int) -> DataError:
    """Return the error for damaged bytes in a shard."""
    return DataError(
        f"{path} is damaged: bytes {begin:,} to {end:,} do not have the checksum that {checksum_file(path.name)} "
        f"lists. {RECOVERY_HINT}"
    )


def mismatched_ranges(actual: np.ndarray, expected: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Return the byte ranges [begin, end) of consecutive checksum blocks with a mismatch, in a file with ``size``
    bytes.
    """
    mismatches = np.flatnonzero(actual != expected)
    runs = np.split(mismatches, np.flatnonzero(np.diff(mismatches) > 1) + 1)
    return [(int(run[0]) << BLOCK_SHIFT, min((int(run[-1]) + 1) << BLOCK_SHIFT, size)) for run in runs if len(run)]


def advise(part: pa.Buffer, flag: int) -> bool:
    """Advise the system how a range of a mapped file will be read (madvise); return whether it succeeded."""
    begin = part.address // mmap.PAGESIZE * mmap.PAGESIZE
    return not _LIBC.madvise(begin, part.address + part.size - begin, flag)
