"""Files of a checkpoint written and read past the page cache, hashed on their way.

A checkpoint is written once and read when the run has ended: in the page cache it would take the memory, and a copy's
time, of what training reads. Several blocks are under way at a time, because one does not keep a fast disk busy. Where
the file system has no direct I/O the page cache is used, and left.
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

from longctx.storage.blocks import BLOCK_BYTES, fill_block, open_file

ALIGNMENT = 4096
"""Direct I/O wants addresses, offsets and lengths in multiples of a disk's sector; no disk has larger ones."""
BLOCKS = 4
"""Transfers under way at a time, each of a block that has a hash: what a file takes of memory is so many blocks."""


class Written(NamedTuple):
    """A file on the disk."""

    num_bytes: int
    hash: str
    """xxh3-128 of all its bytes."""
    block_hashes: str
    """Those of its blocks, one after the other, as a manifest has them."""


class HashedWriter:
    """A new file. Bytes are hashed in the order in which they are written; ``close`` puts them on the disk."""

    def __init__(self, path: Path) -> None:
        """Make the file, in place of one of that name. OSError where the file system refuses, here and later."""
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
        """Append bytes; they may change once this returns."""
        content = memoryview(content).cast("B")
        while content:
            part = content[: BLOCK_BYTES - self._filled]
            self._blocks[self._turn][self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            content = content[len(part) :]
            if self._filled == BLOCK_BYTES:
                self._send()

    def close(self) -> Written:
        """Write the rest and wait until the disk has all of it."""
        size = self._size + self._filled
        if self._filled:
            self._send()
        # In the order in which they were sent.
        for turn in range(self._turn, self._turn + BLOCKS):
            self._finish(turn % BLOCKS)
        # The last block went as a whole one.
        os.ftruncate(self._fd, size)
        os.fsync(self._fd)
        return Written(size, self._digest.hexdigest(), "".join(self._hashes))

    def _send(self) -> None:
        """Hash the block that is filled, begin to write it, and wait for the next one to be free."""
        block, count = memoryview(self._blocks[self._turn]), self._filled
        padded = count
        if self._direct:
            padded = -(-count // ALIGNMENT) * ALIGNMENT
        self._writes[self._turn] = self._workers.submit(self._write_block, block[:padded], self._size, count)
        # While it is on its way: both read the block.
        self._digest.update(block[:count])
        self._size += count
        self._turn, self._filled = (self._turn + 1) % BLOCKS, 0
        self._finish(self._turn)

    def _finish(self, turn: int) -> None:
        """Wait until what was last sent from this memory is written, and take its hashes."""
        write, self._writes[turn] = self._writes[turn], None
        if write is not None:
            self._hashes.append(write.result())

    def _write_block(self, block: memoryview, offset: int, count: int) -> str:
        """Write all of a block; returns the hash of its first ``count`` bytes, the content."""
        block_hash = xxhash.xxh3_128_hexdigest(block[:count])
        while block:
            try:
                written = os.pwrite(self._fd, block, offset)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                # What is left after a disk, a quota or a limit took a part is no multiple of a sector: the usual way
                # says what was wrong.
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
        # Writes that have begun end first: they use the file's number.
        self._workers.shutdown(cancel_futures=True)
        self._file.close()


def read_back(path: Path) -> str:
    """xxh3-128 of a file as the disk has it, several blocks read at a time."""
    digest = xxhash.xxh3_128()
    blocks = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(BLOCKS)]
    file, _ = open_file(path)
    with file, ThreadPoolExecutor(BLOCKS, thread_name_prefix="checkpoint") as workers:
        fd = file.fileno()
        size = os.fstat(fd).st_size
        # Where there is no direct I/O: what was synced leaves the page cache, and comes from the disk again.
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
            # The block is free again: the next part that has no place yet goes there.
            following = start + BLOCKS * BLOCK_BYTES
            if following < size:
                reads.append(begin(following))
    return digest.hexdigest()
