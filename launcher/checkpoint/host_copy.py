"""A copy of what a rank owns, in the machine's memory, so that training goes on while a thread writes it."""

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
    """Memory for a rank's values, taken once: to take it anew for each save would cost as long as the copy itself."""

    def __init__(self, pieces: Sequence[Piece], device: torch.device) -> None:
        """Take it, page by page; page-locked if ``device``, where the values are, is a GPU. RuntimeError if the system
        refuses that."""
        count, self._device = sum(map(_values_of, pieces)), device
        memory = mmap.mmap(-1, max(1, count) * VALUE_BYTES)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        # Pages come when they are first written to: now, while training goes on.
        self._values = torch.frombuffer(memory, dtype=torch.float32, count=count).zero_()
        if device.type == "cuda" and count:
            # Before its memory goes. At the process's end all of it goes at once.
            weakref.finalize(self, lock_pages(self._values, device)).atexit = False

    def fill(self, pieces: Sequence[Piece], values: Iterable[Tensor]) -> list[Tensor]:
        """Copy the values of the pieces; returns them, float32, in their order. They last until the next call."""
        copied, start = [], 0
        for one, tensor in zip(pieces, values, strict=True):
            own = self._values[start : start + one.numel]
            # Those of a GPU leave it one after the other, without a wait in between. In the order of its computation:
            # memory that is freed here is written to behind the copy.
            own.copy_(tensor.detach().flatten(), non_blocking=True)
            copied.append(own)
            start += _values_of(one)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return copied


def _values_of(piece: Piece) -> int:
    """An even number: a piece then begins at a word of 64 bits, by which it is summed without a copy."""
    return piece.numel + piece.numel % 2


class Copies:
    """Takes the memory for a rank's copy when there is some, in a thread."""

    def __init__(self, engine: ZeroEngine, thread: ThreadPoolExecutor, *, wanted: bool, ranks_here: int) -> None:
        """``wanted`` is the same on all ranks; ``ranks_here`` share this machine."""
        self.wanted = wanted
        self._engine, self._thread, self._ranks_here = engine, thread, ranks_here
        self._has_looked = False
        self._taken: Future[HostCopy] | None = None

    def reserve(self) -> None:
        """Take the memory, at the first call: once a step has shown what training itself takes."""
        if not self.wanted or self._has_looked:
            return
        self._has_looked = True
        pieces = self._engine.owned_pieces()
        if self._ranks_here * copy_bytes(pieces) <= _LARGEST_SHARE * available_bytes():
            self._taken = self._thread.submit(HostCopy, pieces, torch.device(self._engine.partition.engine.device))

    def get(self) -> HostCopy | None:
        """The memory; None where there is none, or the system gave less than it had."""
        self.reserve()
        if self._taken is None:
            return None
        # A save is due before the memory is there: it is quicker to wait for it than to write.
        try:
            return self._taken.result()
        except (RuntimeError, MemoryError, OSError):
            return None

    def give_up(self) -> None:
        """Copy no more, and free what was taken: another rank has no memory, and what is free can only be less."""
        self.wanted, self._taken = False, None


def copy_bytes(pieces: Sequence[Piece]) -> int:
    """Bytes of the copy."""
    return VALUE_BYTES * sum(one.numel for one in pieces)
