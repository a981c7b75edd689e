"""``SwapFile``: a rank's tensors in one unlinked file, so that nothing remains on disk however the process ends.

Reads and writes bypass the page cache if the file system has direct I/O. Every transfer is checked: a full or broken
disk raises an error, and never returns other values.
"""

from __future__ import annotations

import errno
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from torch import Tensor

from longctx.tensor_bytes import as_bytes

ALIGNMENT = 4096
"""Direct I/O requires addresses, offsets and lengths in multiples of a disk sector; no disk has larger sectors."""
BLOCK_BYTES = 16 << 20
"""Bytes per transfer."""
WORKERS = 8
"""Concurrent transfers: one cannot saturate a fast disk."""


class SwapFile:
    """Named values. A name keeps its offset in the file, which is reserved on its first write."""

    def __init__(self, folder: Path) -> None:
        """Create the file in ``folder``, which must exist. Raise OSError if the file system rejects a write."""
        self._folder = folder
        self._fd, self.is_direct = _open_unlinked(folder)
        weakref.finalize(self, os.close, self._fd)
        self._extents: dict[str, tuple[int, int]] = {}
        """Name -> (offset, reserved bytes)."""
        self._end = 0
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="swap")
        self._bounce = threading.local()

    @property
    def num_bytes(self) -> int:
        """Bytes reserved on disk."""
        return self._end

    def write(self, name: str, *parts: Tensor) -> list[Future[None]]:
        """Start writing contiguous CPU tensors, back to back.

        They must not change until every future is done. All but the last must be multiples of ``ALIGNMENT`` bytes.
        """
        offset = self._place(name, sum(part.nbytes for part in parts))
        return self._transfer(offset, parts, self._write_block)

    def read(self, name: str, *parts: Tensor) -> list[Future[None]]:
        """Start reading the first values for ``name`` into contiguous CPU tensors, back to back."""
        offset, reserved = self._extents[name]
        wanted = sum(part.nbytes for part in parts)
        assert wanted <= reserved, f"{name} has {reserved} bytes, but {wanted} were requested"
        return self._transfer(offset, parts, self._read_block)

    def _place(self, name: str, num_bytes: int) -> int:
        """Return a name's offset in the file, reserving space on first use; raise OSError if the disk is full."""
        if name not in self._extents:
            # reserve disk blocks now, so that a full disk fails here instead of in a later write
            reserved = -(-num_bytes // ALIGNMENT) * ALIGNMENT
            try:
                os.posix_fallocate(self._fd, self._end, max(reserved, 1))
            except OSError as error:
                raise self._with_folder(error) from error
            self._extents[name] = self._end, reserved
            self._end += reserved
        offset, reserved = self._extents[name]
        assert num_bytes <= reserved, f"{name} was {reserved} bytes, but is {num_bytes} now"
        return offset

    def _transfer(
        self, offset: int, parts: Sequence[Tensor], move_block: Callable[[int, memoryview, bool], None]
    ) -> list[Future[None]]:
        """Submit the tensors to the workers, one transfer at a time."""
        futures = []
        for tensor in parts:
            assert offset % ALIGNMENT == 0, "direct I/O requires aligned file offsets"
            content = as_bytes(tensor).numpy().data
            is_aligned = tensor.data_ptr() % ALIGNMENT == 0
            for start in range(0, len(content), BLOCK_BYTES):
                block = content[start : start + BLOCK_BYTES]
                futures.append(self._workers.submit(move_block, offset + start, block, is_aligned))
            offset += len(content)
        return futures

    def _write_block(self, offset: int, block: memoryview, is_aligned: bool) -> None:
        if self.is_direct and not (is_aligned and len(block) % ALIGNMENT == 0):
            bounce = self._bounce_buffer(len(block))
            # the file's bytes past the transfer's end are unused
            bounce[: len(block)] = block
            block = bounce
        self._repeat(os.pwritev, offset, block)

    def _read_block(self, offset: int, block: memoryview, is_aligned: bool) -> None:
        if self.is_direct and not (is_aligned and len(block) % ALIGNMENT == 0):
            bounce = self._bounce_buffer(len(block))
            self._repeat(os.preadv, offset, bounce)
            block[:] = bounce[: len(block)]
        else:
            self._repeat(os.preadv, offset, block)

    def _repeat(self, call: Callable[[int, list[memoryview], int], int], offset: int, block: memoryview) -> None:
        """Call ``pwritev`` or ``preadv`` until all bytes are transferred: the system may stop earlier."""
        done = 0
        while done < len(block):
            try:
                moved = call(self._fd, [block[done:]], offset + done)
            except OSError as error:
                raise self._with_folder(error) from error
            if moved == 0:
                raise self._with_folder(OSError(errno.EIO, "the file ends too early"))
            done += moved

    def _bounce_buffer(self, num_bytes: int) -> memoryview:
        """Return this worker's aligned buffer, with ``num_bytes`` rounded up."""
        if not hasattr(self._bounce, "buffer"):
            self._bounce.buffer = memoryview(mmap.mmap(-1, BLOCK_BYTES))
        return self._bounce.buffer[: -(-num_bytes // ALIGNMENT) * ALIGNMENT]

    def _with_folder(self, error: OSError) -> OSError:
        """Return the same error with the folder's name."""
        return OSError(error.errno, f"swapping failed: {error.strerror}", str(self._folder))


def _open_unlinked(folder: Path) -> tuple[int, bool]:
    """Open an unlinked file; return it and whether it bypasses the page cache."""
    plain, path = tempfile.mkstemp(prefix=".swap.", dir=folder)
    direct = -1
    try:
        try:
            direct = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            # EINVAL: the file system has no direct I/O
            if error.errno != errno.EINVAL:
                raise
    finally:
        Path(path).unlink()
    try:
        # some file systems accept the flag, but reject the transfer
        if direct >= 0 and _supports_transfer(direct):
            os.close(plain)
            return direct, True
    except BaseException:
        os.close(plain)
        os.close(direct)
        raise
    if direct >= 0:
        os.close(direct)
    _supports_transfer(plain)
    return plain, False


def _supports_transfer(fd: int) -> bool:
    """Write one sector and read it back; return False if the file system rejects such a transfer."""
    block = memoryview(mmap.mmap(-1, ALIGNMENT))
    block[:] = bytes(range(256)) * (ALIGNMENT // 256)
    try:
        os.pwritev(fd, [block], 0)
    except OSError as error:
        if error.errno == errno.EINVAL:
            return False
        raise
    again = memoryview(mmap.mmap(-1, ALIGNMENT))
    os.preadv(fd, [again], 0)
    return bytes(again) == bytes(block)
