"""Sums: a checksum of each 64 KiB of a shard, so that a read checks only the blocks that it touches.

``NNNNN.sums``, stored with ``NNNNN.arrow``, has the xxh3_64 of each block of that file, little-endian uint64; the last
block may be shorter. The manifest holds the xxh3_128 of the sums, and its own hash covers that. Folders of older
releases have none.
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
from longctx.untrusted.reading import read_bounded

BLOCK_SHIFT = 16
BLOCK_BYTES = 1 << BLOCK_SHIFT
"""Part of the format."""

ADVICE = (
    "Copy the shard again, or build the folder again (`longctx data build` as before with --overwrite writes the same "
    "bytes). Or leave the shard out (`longctx data build --without`) and start a new run from the checkpoint's weights "
    "(run.start_from)."
)

_MOST_SUMS_BYTES = 256 * 2**20
"""Those of a shard of 2 TiB."""
_READ_BYTES = 64 * BLOCK_BYTES
# Linux has it since 5.14; Python's mmap does not name it yet.
_POPULATE_READ = 22
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def sums_file(shard: str) -> str:
    """Return the name of a shard's sums: ``00000.sums`` for ``00000.arrow``."""
    return Path(shard).with_suffix(".sums").name


def sum_blocks(path: Path) -> tuple[str, np.ndarray]:
    """Return the xxh3_128 of a file as 32 hex digits, and the xxh3_64 of each of its blocks, uint64, in one read."""
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


def read_sums(folder: Path, entry: ShardEntry) -> np.ndarray:
    """Return the sums of one shard, uint64; raise DataError unless they match the manifest."""
    path = folder / sums_file(entry.file)
    try:
        if path.is_symlink():
            check_link(folder, path.name)
        content = read_bounded(path, _MOST_SUMS_BYTES)
    except FileNotFoundError as error:
        raise DataError(f"{path} is missing, though {MANIFEST_FILE} vouches for it. {ADVICE}") from error
    except OSError as error:
        raise DataError(f"{path} cannot be read ({error.strerror or error}). {ADVICE}") from error
    except ValueError as error:
        raise DataError(f"{path} cannot be read: {error}. {ADVICE}") from error
    if xxhash.xxh3_128_hexdigest(content) != entry.sums:
        raise DataError(f"{path} is damaged: its checksum is not the one in {MANIFEST_FILE}. {ADVICE}")
    # The right checksum is not enough: sums of another file would be compared with wrong blocks.
    if len(content) != 8 * -(-entry.bytes // BLOCK_BYTES):
        raise DataError(f"{path} holds {len(content)} bytes, which are not the sums of {entry.bytes}. {ADVICE}")
    return np.frombuffer(content, np.dtype("<u8"))


class Blocks:
    """Blocks of one mapped file, with the set of verified ones. Threads may share it.

    Each block is checked when any part of it is first used, and only then. Without sums no block is checked.
    """

    def __init__(self, content: pa.Buffer, sums: np.ndarray | None, path: Path) -> None:
        self._content, self._view = content, memoryview(content)
        self._sums, self._path = None, path
        count = -(-content.size // BLOCK_BYTES)
        # One byte per block: setting a byte is atomic in any thread, and the search below runs in C.
        self.seen = bytearray(count)
        """For each block 1 once it has been found right."""
        if sums is not None:
            # Plain integers come from here, faster than from an array.
            self._sums = sums.astype(np.uint64).data
        else:
            self.seen = bytearray(b"\1") * count
        self._seen_view = np.frombuffer(self.seen, np.uint8)
        self.all_seen = sums is None
        """Whether all have been: then nobody has to look for one that has not."""

    def check(self, start: int, stop: int) -> None:
        """Raise DataError if a block with some of these bytes is damaged."""
        first, last = start >> BLOCK_SHIFT, (stop + BLOCK_BYTES - 1) >> BLOCK_SHIFT
        if self.seen.find(0, first, last) >= 0:
            self._read(first, last)

    def check_items(self, starts: np.ndarray, size: int) -> None:
        """Check the blocks of items of ``size`` bytes each, which begin at ``starts`` [n], int64."""
        blocks = np.unique(np.concatenate([starts >> BLOCK_SHIFT, (starts + size - 1) >> BLOCK_SHIFT]))
        blocks = blocks[self._seen_view[blocks] == 0]
        # Adjacent blocks together: the system is then asked for them once.
        for run in np.split(blocks, np.flatnonzero(np.diff(blocks) > 1) + 1):
            if len(run):
                self._read(int(run[0]), int(run[-1]) + 1)

    def _read(self, first: int, last: int) -> None:
        """Check the blocks from ``first`` to ``last`` (exclusive) that are not verified yet."""
        assert self._sums is not None
        stop, ahead = min(last << BLOCK_SHIFT, self._content.size), 0
        number = self.seen.find(0, first, last)
        while number >= 0:
            begin = number << BLOCK_SHIFT
            # A few blocks at a time: data read ahead must still be in memory when its turn comes.
            if begin >= ahead:
                ahead = min(begin + _READ_BYTES, stop)
                self._bring(begin, ahead)
            end = begin + BLOCK_BYTES
            if xxhash.xxh3_64_intdigest(self._view[begin:end]) != self._sums[number]:
                raise damaged_blocks(self._path, begin, min(end, stop))
            self.seen[number] = 1
            number = self.seen.find(0, number + 1, last)
        self.all_seen = self.seen.find(0) < 0

    def _bring(self, begin: int, end: int) -> None:
        """Read these bytes into memory; raise DataError if accessing them would kill the process with a signal."""
        part = self._content.slice(begin, end - begin)
        advise(part, mmap.MADV_WILLNEED)
        # If the system does not support this, reads go the ordinary way.
        if advise(part, _POPULATE_READ) or ctypes.get_errno() != errno.EFAULT:
            return
        if end - begin > BLOCK_BYTES:
            # Find the block that fails.
            for start in range(begin, end, BLOCK_BYTES):
                self._bring(start, min(start + BLOCK_BYTES, end))
            return
        raise DataError(
            f"{self._path} cannot be read from byte {begin:,} to {end:,}: the disk failed, or the file was cut short. "
            f"{ADVICE}"
        )


def damaged_blocks(path: Path, begin: int, end: int) -> DataError:
    """Return the error for damaged bytes of a shard."""
    return DataError(
        f"{path} is damaged: bytes {begin:,} to {end:,} do not have the checksum that {sums_file(path.name)} "
        f"lists. {ADVICE}"
    )


def damaged_ranges(found: np.ndarray, listed: np.ndarray, size: int) -> list[tuple[int, int]]:
    """Return the byte range [begin, end) of each run of blocks whose sums differ, in a file of ``size`` bytes."""
    wrong = np.flatnonzero(found != listed)
    runs = np.split(wrong, np.flatnonzero(np.diff(wrong) > 1) + 1)
    return [(int(run[0]) << BLOCK_SHIFT, min((int(run[-1]) + 1) << BLOCK_SHIFT, size)) for run in runs if len(run)]


def advise(part: pa.Buffer, advice: int) -> bool:
    """Advise the system how a part of a mapped file will be read (madvise); return whether it succeeded."""
    begin = part.address // mmap.PAGESIZE * mmap.PAGESIZE
    return not _LIBC.madvise(begin, part.address + part.size - begin, advice)
