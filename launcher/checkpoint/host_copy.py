"""Host copy of a rank's state, so that training continues while a thread writes it."""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from longctx.checkpoint_manifest import VALUE_BYTES
from longctx.kernels.memory import available_bytes, lock_pages

if TYPE_CHECKING:  # importing DeepSpeed takes seconds, and decides on a device
    from parallel.zero.engine import ZeroEngine
    from parallel.zero.state import Piece

_LARGEST_SHARE = 0.8
"""Of the memory that is free after a step, what the copies of a machine's ranks may take."""


class HostCopy:
    """Host memory for a rank's values, allocated once: allocating it for each save would cost as much as the copy."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        """Allocate the memory page by page; page-locked if ``device``, which holds the values, is a GPU.

        Raise RuntimeError if the system refuses to lock the pages.
        """
        count, self._device = sum(map(_values_of, pieces)), device
        memory = mmap.mmap(-1, max(1, count) * VALUE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        # Pages are allocated on first write: do it now, while training continues.
        self._values = torch.frombuffer(memory, dtype=torch.float32, count=count).zero_()
        if device.type == "cuda" and count:
            # Unlock before the memory is freed. At process exit all of it is released at once.
            weakref.finalize(self, lock_pages(self._values, device)).atexit = False

    def fill(self, pieces: Sequence[Piece], values: Iterable[Tensor]) -> list[Tensor]:
        """Copy the values of the pieces and return them as float32, in order. They stay valid until the next call."""
        copied, start = [], 0
        for one, tensor in zip(pieces, values, strict=True):
            own = self._values[start : start + one.numel]
            # GPU values are copied one after the other without waiting, in stream order: memory freed here is only
            # overwritten after its copy.
            own.copy_(tensor.detach().flatten(), non_blocking=True)
            copied.append(own)
            start += _values_of(one)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied


def _values_of(piece: Piece) -> int:
    """Return a piece's size rounded up to even, so that each piece starts at a 64-bit word and is summed uncopied."""
    return piece.numel + piece.numel % 2


class Copies:
    """Allocator of a rank's host copy: takes the memory in a thread if enough is free."""

    def __init__(self, engine: ZeroEngine, thread: ThreadPoolExecutor, *, wanted: bool, ranks_here: int) -> None:
        """Store settings without allocating. ``wanted`` is the same on all ranks; ``ranks_here`` share this machine."""
        self.wanted = wanted
        self._engine, self._thread, self._ranks_here = engine, thread, ranks_here
        self._has_looked = False
        self._taken: Future[HostCopy] | None = None

    def reserve(self) -> None:
        """Allocate the memory at the first call, which comes after a step has shown how much training itself needs."""
        if not self.wanted or self._has_looked:
            return
        self._has_looked = True
        pieces = self._engine.owned_pieces()
        if self._ranks_here * copy_bytes(pieces) <= _LARGEST_SHARE * available_bytes():
            self._taken = self._thread.submit(HostCopy, pieces, torch.device(self._engine.partition.engine.device))

    def get(self) -> HostCopy | None:
        """Return the memory; None if there is too little or the system did not provide it."""
        self.reserve()
        if self._taken is None:
            return None
        # A save is due before the memory is ready: waiting for it is faster than writing without a copy.
        try:
            return self._taken.result()
        except (RuntimeError, MemoryError, OSError):
            return None

    def give_up(self) -> None:
        """Disable copies and free the memory: another rank has none, and free memory can only shrink."""
        self.wanted, self._taken = False, None


def copy_bytes(pieces: Sequence[Piece]) -> int:
    """Return the size of the copy in bytes."""
    return VALUE_BYTES * sum(one.numel for one in pieces)
