"""Read files in checksum blocks, hashing each block before any of its bytes is used."""

from __future__ import annotations

import errno
import mmap
import os
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
import xxhash
from torch import Tensor

from longctx.errors import CheckpointError
from longctx.files import size_problem

BLOCK_BYTES = 4 << 20
"""Bytes per checksum block; the last block may be shorter."""
HASH_HEX_LENGTH = 32
"""Hex digits in an xxh3-128."""
_DISK_PREFETCH, _CACHE_PREFETCH = 8, 2
"""Concurrent block reads: one cannot saturate a fast disk, but the page cache has its own read-ahead."""


def num_blocks(num_bytes: int) -> int:
    """Return the number of blocks in a file with ``num_bytes`` bytes."""
    return -(-num_bytes // BLOCK_BYTES)


def describe_file(path: Path) -> dict[str, Any]:
    """Return a file's manifest entry: its size, its hash and its block hashes, all xxh3-128."""
    whole, blocks, size = xxhash.xxh3_128(), [], 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            whole.update(block)
            blocks.append(xxhash.xxh3_128_hexdigest(block))
            size += len(block)
    return {"bytes": size, "hash": whole.hexdigest(), "blocks": "".join(blocks)}


def open_file(path: Path, flags: int = os.O_RDONLY, *, past_cache: bool = True) -> tuple[FileIO, bool]:
    """Open a file, past the page cache if requested and supported; return it and whether direct I/O is used.

    ``flags`` are the flags for ``os.open``.
    """
    mode = "rb" if flags == os.O_RDONLY else "r+b"
    flags |= os.O_CLOEXEC
    if past_cache and hasattr(os, "O_DIRECT"):
        try:
            return FileIO(os.open(path, flags | os.O_DIRECT, 0o666), mode), True
        except OSError as error:
            # some file systems have no direct I/O
            if error.errno != errno.EINVAL:
                raise
    return FileIO(os.open(path, flags, 0o666), mode), False


def fill_block(fd: int, block: memoryview, start: int, count: int) -> None:
    """Read ``count`` file bytes from ``start`` into a block; raise OSError if the file is shorter.

    For direct I/O the block is page-aligned, and its length is a multiple of the sector size.
    """
    done = 0
    while done < count:
        # request the full block, even past the end of the file: direct I/O requires whole sectors
        read = os.preadv(fd, [block[done:]], start + done)
        if not read:
            raise OSError(errno.EIO, f"the file ends at byte {start + done}")
        done += read


@dataclass
class _File:
    """An open file."""

    path: Path
    content: FileIO
    num_bytes: int
    hashes: str | None
    """Concatenated block hashes; None if the manifest has none."""
    next_byte: int = 0
    """Byte after the last requested one."""


class _Block(NamedTuple):
    """A block that has been read, or is being read."""

    memory: mmap.mmap
    read: Future[None]


# A manifest has a hash per block in addition to the file's hash. So a byte range is read once, directly into its
# destination, and verified without reading the full file. Files without block hashes take the same path.
class BlockReader:
    """Reader for byte ranges. Threads read and hash several blocks at a time; a single thread calls it."""

    def __init__(self, *, past_cache: bool) -> None:
        """Set up the reader; ``past_cache`` bypasses the page cache if the file system has direct I/O."""
        self._past_cache, self._prefetch = past_cache, _CACHE_PREFETCH
        if past_cache:
            self._prefetch = _DISK_PREFETCH
        # ranges that share a block, or alternate between a few files, find it in memory
        self._most_held = 2 * self._prefetch
        # Files, threads and memory are freed with the reader, even without ``close``.
        self._files: dict[str, _File] = {}
        self._blocks: OrderedDict[tuple[str, int], _Block] = OrderedDict()
        """Keyed by file and block number, least recently used first."""
        self._workers: ThreadPoolExecutor | None = None

    def add(self, path: Path, num_bytes: int, hashes: str | None) -> None:
        """Open a plain file; raise OSError if the system fails, or if its size is not ``num_bytes``."""
        content, _ = open_file(path, past_cache=self._past_cache)
        found = os.fstat(content.fileno()).st_size
        if found != num_bytes:
            raise OSError(errno.EIO, f"it {size_problem(path, num_bytes)}")
        self._files[path.name] = _File(path, content, num_bytes, hashes)

    def read_into(self, name: str, start: int, out: Tensor) -> None:
        """Fill ``out``, flat uint8 on the CPU, with the file's bytes from ``start``.

        Raise CheckpointError if a block was changed; bytes filled before are correct.
        """
        if not len(out):
            return
        file = self._files[name]
        stop = wanted = start + len(out)
        # A sequential reader will continue, since values are stored in the order a run reads them: prefetch.
        if start == file.next_byte:
            wanted += self._prefetch * BLOCK_BYTES
        file.next_byte = stop
        end = min(num_blocks(wanted), num_blocks(file.num_bytes))
        for number in range(start // BLOCK_BYTES, num_blocks(stop)):
            for block_number in range(number, min(number + self._prefetch, end)):
                self._begin(file, block_number)
            block = self._blocks[name, number]
            block.read.result()
            first = number * BLOCK_BYTES
            lo, hi = max(start, first), min(stop, first + BLOCK_BYTES)
            # PyTorch's copy releases the GIL, Python's would not
            values = torch.frombuffer(block.memory, dtype=torch.uint8, count=hi - lo, offset=lo - first)
            out[lo - start : hi - start].copy_(values)

    def close(self) -> None:
        """Close the files and free the memory."""
        if self._workers is not None:
            self._workers.shutdown(cancel_futures=True)
            self._workers = None
        for file in self._files.values():
            file.content.close()
        self._files.clear()
        self._blocks.clear()

    def _begin(self, file: _File, number: int) -> None:
        """Start reading a block, unless it has been read or is being read."""
        key = file.path.name, number
        if key in self._blocks:
            self._blocks.move_to_end(key)
            return
        if len(self._blocks) < self._most_held:
            memory = mmap.mmap(-1, BLOCK_BYTES)
        else:
            # Reuse the least recently used block; its read may have been unused, or even failed.
            _, (memory, read) = self._blocks.popitem(last=False)
            read.exception()
        if self._workers is None:
            # created late: most readers only read the manifest
            self._workers = ThreadPoolExecutor(self._prefetch, thread_name_prefix="checkpoint")
        self._blocks[key] = _Block(memory, self._workers.submit(_read_block, file, number, memory))


def _read_block(file: _File, number: int, memory: mmap.mmap) -> None:
    """Read a block into memory; raise CheckpointError if it was changed."""
    first = number * BLOCK_BYTES
    count = min(BLOCK_BYTES, file.num_bytes - first)
    block = memoryview(memory)
    try:
        fill_block(file.content.fileno(), block, first, count)
    except OSError as error:
        raise CheckpointError(f"{file.path} cannot be read: {error}.") from error
    if file.hashes is None:
        return
    expected = file.hashes[number * HASH_HEX_LENGTH : (number + 1) * HASH_HEX_LENGTH]
    if xxhash.xxh3_128_hexdigest(block[:count]) != expected:
        raise CheckpointError(
            f"{file.path} is damaged: bytes {first:,} to {first + count:,} do not match the manifest's xxh3-128."
        )
