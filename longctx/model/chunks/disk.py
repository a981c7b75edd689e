"""The store of a layer by chunks on a disk: of all tokens, the memory holds the chunks that are being computed."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longctx.model.chunks.store import of_tokens
from longctx.model.kept import Copies
from longctx.swap_file import SwapFile

_UNDER_WAY = 4
"""Pieces that may be on their way to the disk: older ones are waited for, which bounds the memory that they take."""


class Disk:
    """A ``SwapFile`` whose places are used again when nobody reads them any more."""

    def __init__(self, folder: Path) -> None:
        """OSError where the folder cannot be written."""
        self.file = SwapFile(folder)
        self.worker = ThreadPoolExecutor(1, thread_name_prefix="store")
        """One after another: a piece is written before it is read."""
        self._leaving: deque[Future[None]] = deque()
        self._written: dict[str, Future[None]] = {}
        """The last write to each place."""
        self._free: dict[int, list[str]] = defaultdict(list)
        self._numbers = itertools.count()

    def take(self, num_bytes: int) -> str:
        """A place for so many bytes."""
        if self._free[num_bytes]:
            return self._free[num_bytes].pop()
        return f"{num_bytes} bytes, {next(self._numbers)}"

    def give_back(self, num_bytes: int, place: str) -> None:
        """Let another piece have the place."""
        self._free[num_bytes].append(place)

    def write(self, place: str, host: Tensor, mark: Any) -> None:
        """Start to write memory of the host once ``mark`` is passed. OSError for an earlier piece's trouble."""
        written = self._written[place] = self.worker.submit(self._write, place, host, mark)
        self._leaving.append(written)
        while len(self._leaving) > _UNDER_WAY:
            self._leaving.popleft().result()

    def read(self, place: str, host: Tensor) -> None:
        """Read a place into the host's memory, in the worker. OSError where it could not be read, or not written."""
        self._written[place].result()
        for block in self.file.read(place, host):
            block.result()

    def _write(self, place: str, host: Tensor, mark: Any) -> None:
        if mark is not None:
            mark.synchronize()
        for block in self.file.write(place, host):
            block.result()


@cache
def disk_in(folder: str) -> Disk:
    """This process's file in the folder."""
    return Disk(Path(folder))


class DiskStore:
    """Values lie on a disk; a thread reads and writes them while others are computed."""

    def __init__(self, disk: Disk, device: torch.device, chunks: Sequence[slice]) -> None:
        """Values of all tokens are read in these ``chunks``, or whole."""
        self.disk, self.device, self.copies, self.chunks = disk, device, Copies(device), chunks

    def empty(self, num_tokens: int, like: Tensor) -> OnDisk:
        return OnDisk(self, of_tokens(like.shape, num_tokens), like.dtype, self.chunks)

    empty_chunks = empty

    def put(self, x: Tensor) -> OnDisk:
        pieces: Sequence[slice] = [slice(0, x.shape[1])]
        if x.shape[1] == self.chunks[-1].stop:
            pieces = self.chunks
        stored = OnDisk(self, x.shape, x.dtype, pieces)
        for piece in pieces:
            stored.write(piece, x[:, piece])
        return stored


class OnDisk:
    """Values [B, t, …] on a disk, in pieces."""

    def __init__(self, store: DiskStore, shape: Sequence[int], dtype: torch.dtype, pieces: Sequence[slice]) -> None:
        self._store, self._shape, self._dtype, self._pieces = store, shape, dtype, pieces
        self._places: dict[int, tuple[int, str]] = {}
        """First token of a piece -> (bytes, place)."""

    def write(self, tokens: slice, x: Tensor) -> None:
        x, mark = x.contiguous(), None
        if x.device.type != "cpu":
            x = self._store.copies.to_host(x)
            mark = self._store.copies.mark()
        if tokens.start not in self._places:
            self._places[tokens.start] = x.nbytes, self._store.disk.take(x.nbytes)
        self._store.disk.write(self._places[tokens.start][1], x, mark)

    def fetch(self, tokens: slice) -> FromDisk:
        return FromDisk(self._store, self._empty(tokens), [(slice(None), self._places[tokens.start][1])])

    def whole(self) -> FromDisk:
        places = [(piece, self._places[piece.start][1]) for piece in self._pieces]
        return FromDisk(self._store, self._empty(slice(0, self._shape[1])), places)

    def on_device(self) -> Tensor:
        return self.whole().wait()

    def _empty(self, tokens: slice) -> Tensor:
        """Memory of the host for some tokens."""
        return self._store.copies.host_memory(of_tokens(self._shape, tokens.stop - tokens.start), self._dtype)

    def __del__(self) -> None:
        # What is still to be read of these places is read before another piece is written to them.
        for num_bytes, place in self._places.values():
            self._store.disk.give_back(num_bytes, place)


class FromDisk:
    """Values on their way from a disk."""

    def __init__(self, store: DiskStore, host: Tensor, places: Sequence[tuple[slice, str]]) -> None:
        self._store = store
        self._job: Future[tuple[Tensor, Any]] = store.disk.worker.submit(self._bring, host, places)

    def wait(self) -> Tensor:
        values, mark = self._job.result()
        self._store.copies.wait(mark)
        return values

    def _bring(self, host: Tensor, places: Sequence[tuple[slice, str]]) -> tuple[Tensor, Any]:
        """The values on the device, and what to wait for before they are read."""
        for tokens, place in places:
            part = host[:, tokens]
            if part.is_contiguous():
                self._store.disk.read(place, part)
            else:  # of several rows
                rows = torch.empty_like(part, memory_format=torch.contiguous_format)
                self._store.disk.read(place, rows)
                part.copy_(rows)
        if self._store.device.type == "cpu":
            return host, None
        values = self._store.copies.to_device(host)
        return values, self._store.copies.mark()
