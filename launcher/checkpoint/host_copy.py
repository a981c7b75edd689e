"""Host copy of a rank's state: training continues while a thread writes it to disk."""

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
    from parallel.zero.zero_engine import ZeroEngine
    from parallel.zero.zero_state import StatePiece

_LARGEST_SHARE = 0.8
"""Largest fraction of free memory, measured after a step, that a machine's ranks may use for their copies."""


# A single buffer per rank is enough: a save starts only after the previous one is committed.
class HostCopy:
    """Host buffer for a rank's values, allocated once: allocating per save would cost as much as the copy."""

    def __init__(self, pieces: Sequence[StatePiece], device: torch.device) -> None:
        """Allocate and touch the memory, page-locked if ``device``, which holds the values, is a GPU.

        Raise RuntimeError if the system refuses to lock the pages.
        """
        count, self._device = sum(map(_values_of, pieces)), device
        memory = mmap.mmap(-1, max(1, count) * VALUE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        # The kernel allocates pages on first write: do it now, while training continues.
        self._values = torch.frombuffer(memory, dtype=torch.float32, count=count).zero_()
        if device.type == "cuda" and count:
            # Unlock before the memory is freed. At process exit everything is released at once.
            weakref.finalize(self, lock_pages(self._values, device)).atexit = False

    def fill(self, pieces: Sequence[StatePiece], values: Iterable[Tensor]) -> list[Tensor]:
        """Copy the slices' values and return them as float32, in order. They stay valid until the next call."""
        copied, start = [], 0
        for one, tensor in zip(pieces, values, strict=True):
            own = self._values[start : start + one.numel]
            # GPU copies are asynchronous but stream-ordered: memory that ``values`` frees here is reused only after its
            # copy.
            own.copy_(tensor.detach().flatten(), non_blocking=True)
            copied.append(own)
            start += _values_of(one)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied


def _values_of(piece: StatePiece) -> int:
    """Round a slice's size up to even: each slice then starts at a 64-bit word, and its checksum needs no copy."""
    return piece.numel + piece.numel % 2


class HostCopyAllocator:
    """Owner of a rank's host copy: allocates it in a thread if enough memory is free."""

    def __init__(self, engine: ZeroEngine, thread: ThreadPoolExecutor, *, wanted: bool, local_ranks: int) -> None:
        """Store settings without allocating. ``wanted`` is equal on all ranks; ``local_ranks`` share this machine."""
        self.wanted = wanted
        self._engine, self._thread, self._local_ranks = engine, thread, local_ranks
        self._has_reserved = False
        self._taken: Future[HostCopy] | None = None

    def reserve(self) -> None:
        """Allocate on the first call, made after a training step has shown how much memory training itself needs."""
        if not self.wanted or self._has_reserved:
            return
        self._has_reserved = True
        pieces = self._engine.owned_pieces()
        if self._local_ranks * host_copy_bytes(pieces) <= _LARGEST_SHARE * available_bytes():
            self._taken = self._thread.submit(HostCopy, pieces, torch.device(self._engine.partition.engine.device))

    def get(self) -> HostCopy | None:
        """Return the buffer; None if memory is short or the system refused it."""
        self.reserve()
        if self._taken is None:
            return None
        # If a save is due before the memory is ready, waiting for it is faster than writing without a copy.
        try:
            return self._taken.result()
        except (RuntimeError, MemoryError, OSError):
            return None

    def disable(self) -> None:
        """Disable copies for the rest of the run and free the memory, because another rank has no copy."""
        # No retry: free memory only shrinks during a run.
        self.wanted, self._taken = False, None


def host_copy_bytes(pieces: Sequence[StatePiece]) -> int:
    """Return the copy's size in bytes."""
    return VALUE_BYTES * sum(one.numel for one in pieces)
