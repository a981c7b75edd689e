"""Write and read checkpoint files past the page cache, hashing on the way.

Several checksum blocks are in flight at a time, because one cannot saturate a fast disk. Without direct I/O in the file
system, the page cache is used.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import xxhash

from longctx.storage.hashed_blocks import BLOCK_BYTES, fill_block, open_file

ALIGNMENT = 4096
"""Direct I/O requires addresses, offsets and lengths in multiples of a disk sector; no disk has larger sectors."""
BLOCKS = 4
"""Concurrent transfers, one checksum block each: bounds the memory per file."""


# A checkpoint is written once, and read only after the run: in the page cache it would take memory, and copy time, away
# from training data.
class Written(NamedTuple):
    """A finished file on disk."""

    num_bytes: int
    hash: str
    """xxh3-128 over all its bytes."""
    block_hashes: str
    """Concatenated block hashes, as a manifest stores them."""


class HashedWriter:
    """Writer for a new file. Bytes are hashed in write order; ``close`` flushes them to disk."""

    def __init__(self, path: Path) -> None:
        """Create the file, replacing an existing one. Like all later calls, raise OSError if the file system fails."""
        self._path, self._size = path, 0
        self._digest = xxhash.xxh3_128()
        self._file, self._direct = open_file(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        self._fd = self._file.fileno()
        self._workers = ThreadPoolExecutor(BLOCKS, thread_name_prefix="checkpoint")
        self._blocks = [mmap.mmap(-1, BLOCK_BYTES) for _ in range(BLOCKS)]
        self._writes: list[Future[str] | None] = [None] * BLOCKS
        self._hashes: list[str] = []
        self._turn = self._filled = 0

    def write(self, content: memoryview | bytes) -> None:
        """Append bytes; the caller may reuse the buffer when this returns."""
        content = memoryview(content).cast("B")
        while content:
            part = content[: BLOCK_BYTES - self._filled]
            self._blocks[self._turn][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._send()

    def close(self) -> Written:
        """Write the remaining bytes and wait until everything is on disk."""
        size = self._size + self._filled
        if self._filled:
            self._send()
        # in submission order
        for turn in range(self._turn, self._turn + BLOCKS):
            self._finish(turn % BLOCKS)
        # the last block was padded to sector size
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        return Written(size, self._digest.hexdigest(), "".join(self._hashes))

    def _send(self) -> None:
        """Hash the filled block, start writing it, and wait for the next buffer to be free."""
        block, count = memoryview(self._blocks[self._turn]), self._filled
        padded = count
        if self._direct:
            padded = -(-count // ALIGNMENT) * ALIGNMENT
        self._writes[self._turn] = self._workers.submit(self._write_block, block[:padded], self._size, count)
        # overlaps with the write: both only read the block
        self._digest.update(block[:count])
        self._size += count
        self._turn, self._filled = (self._turn + 1) % BLOCKS, 0
        self._finish(self._turn)

    def _finish(self, turn: int) -> None:
        """Wait for this buffer's last write, and store its hash."""
        write, self._writes[turn] = self._writes[turn], None
        if write is not None:
            self._hashes.append(write.result())

    def _write_block(self, block: memoryview, offset: int, count: int) -> str:
        """Write a full block; return the hash over its content, the first ``count`` bytes."""
        block_hash = xxhash.xxh3_128_hexdigest(block[:count])
        while block:
            try:
                written = os.pwrite(self._fd, block, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # After a partial write because of a full disk, a quota or a limit, the remainder is not a multiple of a
                # sector: the buffered path reports the actual error.
                with self._path.open("r+b", buffering=0) as file:
                    file.seek(offset)
                    written = file.write(block) or 0
            offset += written
            block = block[written:]
        return block_hash

    def __enter__(self) -> HashedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # let running writes end first: they use the file descriptor
        self._workers.shutdown(cancel_futures=True)
        self._file.close()


def read_back(path: Path) -> str:
    """Return a file's xxh3-128 as stored on disk, reading several blocks at a time."""
    digest = xxhash.xxh3_128()
    blocks = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(BLOCKS)]
    file, _ = open_file(path)
    with file, ThreadPoolExecutor(BLOCKS, thread_name_prefix="checkpoint") as workers:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        # Without direct I/O, evict synced data from the page cache, so that it is read from disk again.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

        def begin(start: int) -> Future[None]:
            block = blocks[start // BLOCK_BYTES % BLOCKS]
            return workers.submit(fill_block, fd, block, start, min(BLOCK_BYTES, size - start))

        starts = range(0, size, BLOCK_BYTES)
        reads = deque(begin(start) for start in starts[:BLOCKS])
        for start in starts:
            reads.popleft().result()
            digest.update(blocks[start // BLOCK_BYTES % BLOCKS][: size - start])
            # the block is free again: reuse it for the next pending read
            next_start = start + BLOCKS * BLOCK_BYTES
            if next_start < size:
                reads.append(begin(next_start))
    return digest.hexdigest()
