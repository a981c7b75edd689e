"""Disk store for chunked layers: memory holds only the chunks that are being computed."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor

from longctx.model.async_copies import AsyncCopies, FromHost, HostTensor, InFlightTensors, Mark, of_tokens
from longctx.swap_file import SwapFile

_UNDER_WAY = 4
"""Writes in flight: older ones are waited for, which bounds their memory."""


class Disk:
    """``SwapFile`` that reuses its places once they are no longer read."""

    def __init__(self, folder: Path) -> None:
        """Open the file; raise OSError if the directory cannot be written."""
        self.file = SwapFile(folder)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="store")
        """A single thread, so that values are written before they are read."""
        self._pending_writes: deque[Future[None]] = deque()
        self._written: dict[str, Future[None]] = {}
        """The last write to each place."""
        self._free: dict[int, list[str]] = defaultdict(list)
        self._numbers = itertools.count()

    def take(self, num_bytes: int) -> str:
        """Return a place for ``num_bytes`` bytes."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        return f"{num_bytes} bytes, {next(self._numbers)}"

    def release(self, num_bytes: int, place: str) -> None:
        """Release the place for other values."""
        self._free[num_bytes].append(place)

    def write(self, place: str, parts: Sequence[Tensor], ready: Callable[[], None]) -> None:
        """Start to write host tensors, one after another, once ``ready`` returns.

        Raise OSError if an earlier write failed.
        """
        written = self._written[place] = self.worker.submit(self._write, place, parts, ready)
        self._pending_writes.append(written)
        while len(self._pending_writes) > _UNDER_WAY:
            self._pending_writes.popleft().result()

    def reader(self, place: str) -> Callable[[Sequence[Tensor]], None]:
        """Return a function that reads the place's present contents into host tensors.

        It runs in the worker, and raises OSError if the place could not be read or written.
        """
        # Looked up now: a later write would wait in the worker behind this very read, which would wait for it.
        written = self._written[place]

        def read(parts: Sequence[Tensor]) -> None:
            written.result()
            for block in self.file.read(place, *parts):
                block.result()

        return read

    def _write(self, place: str, parts: Sequence[Tensor], ready: Callable[[], None]) -> None:
        ready()
        for block in self.file.write(place, *parts):
            block.result()


@cache
def disk_in(folder: str) -> Disk:
    """Return this process's file in the directory."""
    return Disk(Path(folder))


class DiskStore:
    """Store on a disk; a thread reads and writes values while others are computed."""

    def __init__(self, disk: Disk, copies: AsyncCopies, chunks: Sequence[slice]) -> None:
        """Create the store; values for all tokens are read in these ``chunks``, or all at once."""
        self.disk, self.copies, self.chunks = disk, copies, chunks
        self.in_flight = InFlightTensors(copies)

    def empty(self, num_tokens: int, like: Tensor) -> DiskTensor:
        return DiskTensor(self, of_tokens(like.shape, num_tokens), like.dtype, self.chunks)

    empty_chunks = empty

    def put(self, x: Tensor) -> DiskTensor:
        pieces: Sequence[slice] = [slice(0, x.shape[1])]
        if x.shape[1] == self.chunks[-1].stop:
            pieces = self.chunks
        stored = DiskTensor(self, x.shape, x.dtype, pieces)
        for piece in pieces:
            stored.write(piece, x[:, piece])
        return stored


class DiskTensor:
    """Values [B, t, …] on a disk, stored by token ranges."""

    def __init__(self, store: DiskStore, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[slice]) -> None:
        self._store, self._shape, self._dtype, self._pieces = store, shape, dtype, pieces
        self._extents: dict[int, tuple[int, str]] = {}
        """Maps a range's first token to (bytes, place)."""

    def write(self, tokens: slice, x: Tensor) -> None:
        store, x = self._store, x.contiguous()
        if tokens.start not in self._extents:
            self._extents[tokens.start] = x.nbytes, store.disk.take(x.nbytes)
        place = self._extents[tokens.start][1]
        if not store.copies.is_asynchronous:
            store.disk.write(place, [x], _no_wait)
            return
        host = HostTensor(store.copies, x.shape, x.dtype)
        mark = host.write(slice(0, x.shape[1]), x)
        store.in_flight.hold(x, mark)
        store.disk.write(place, host.pages, partial(store.copies.wait_on_host, mark))

    def fetch(self, tokens: slice) -> FromDisk:
        return self._fetch_pieces(tokens, [tokens])

    def whole(self) -> FromDisk:
        return self._fetch_pieces(slice(0, self._shape[1]), self._pieces)

    def on_device(self) -> Tensor:
        return self.whole().wait()

    def _fetch_pieces(self, tokens: slice, pieces: Sequence[slice]) -> FromDisk:
        """Start to fetch some tokens' values, in these token ranges, to the device."""
        values = torch.empty(
            of_tokens(self._shape, tokens.stop - tokens.start), dtype=self._dtype, device=self._store.copies.device
        )
        readers = []
        for piece in pieces:
            part = values[:, piece.start - tokens.start : piece.stop - tokens.start]
            readers.append((part, self._store.disk.reader(self._extents[piece.start][1])))
        return FromDisk(self._store, values, readers)

    def __del__(self) -> None:
        # The worker finishes pending reads of these places before it writes other values to them.
        for num_bytes, place in self._extents.values():
            self._store.disk.release(num_bytes, place)


class FromDisk:
    """Values being read from a disk."""

    def __init__(self, store: DiskStore, values: Tensor, readers: Sequence[tuple[Tensor, Callable]]) -> None:
        # Marked here: computation during the read does not use the memory for these values.
        computed = store.copies.computed()
        self._job: Future[FromHost] = store.disk.worker.submit(_read_to_device, store.copies, values, readers, computed)

    def wait(self) -> Tensor:
        return self._job.result().wait()


def _read_to_device(
    copies: AsyncCopies, values: Tensor, readers: Sequence[tuple[Tensor, Callable]], computed: Mark
) -> FromHost:
    """Read each part of ``values`` from the disk, and start to copy it to the device."""
    mark = None
    for part, read in readers:
        tokens = slice(0, part.shape[1])
        if copies.is_asynchronous:
            host = HostTensor(copies, part.shape, part.dtype)
            read(host.pages)
            mark = host.copy_to(part, tokens, computed)
        elif part.is_contiguous():
            read([part])
        else:  # several rows
            rows = torch.empty_like(part, memory_format=torch.contiguous_format)
            read([rows])
            part.copy_(rows)
    return FromHost(copies, values, mark)


def _no_wait() -> None:
    """Return at once: values in host memory need no wait."""
