"""State in a ``SwapFile``: what DeepSpeed's swapper of optimiser state reads and writes through, and its path.

DeepSpeed's own handle (``async_io``) counts transfers that have ended and looks at none of their results: where a disk
is full or fails it goes on with whatever the memory held before. Nor does it start without libaio and a compiler.
"""

from __future__ import annotations

import mmap
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper
from torch import Tensor

from longctx.swap_file import SwapFile
from parallel.zero.options import ZeroOptions


@dataclass(frozen=True, kw_only=True)
class SwapSpace:
    """Where a rank's state is swapped to."""

    file: SwapFile
    path: str
    """Folder that DeepSpeed wants to be given; nothing is ever written there."""
    pin_memory: bool
    """Whether memory that transfers go through is page-locked; False on CPUs, where no device copies from it."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Memory that the file needs no copy for."""
        if self.pin_memory:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        # Whole pages, which a tensor of PyTorch's own does not begin at.
        return torch.frombuffer(mmap.mmap(-1, max(1, numel) * dtype.itemsize), dtype=dtype, count=numel)


@contextmanager
def swap_space(zero: ZeroOptions) -> Iterator[SwapSpace | None]:
    """DeepSpeed's engine that starts within the block swaps to a file of its own; None where it swaps nothing.

    OSError where ``nvme_path`` cannot be written.
    """
    if not zero.swaps:
        yield None
        return
    accelerator: Any = get_accelerator()
    Path(zero.nvme_path).mkdir(parents=True, exist_ok=True)
    pin_memory = zero.pin_memory and accelerator.device_name() != "cpu"
    # DeepSpeed makes folders and removes what it finds there: here they are another one's for no run.
    with tempfile.TemporaryDirectory(prefix=".swap.", dir=zero.nvme_path) as path:
        space = SwapSpace(file=SwapFile(Path(zero.nvme_path)), path=path, pin_memory=pin_memory)
        builder = partitioned_optimizer_swapper.AsyncIOBuilder
        extension = SimpleNamespace(aio_handle=lambda **_: _Handle(space))
        partitioned_optimizer_swapper.AsyncIOBuilder = lambda: SimpleNamespace(load=lambda: extension)  # type: ignore
        try:
            yield space
        finally:
            partitioned_optimizer_swapper.AsyncIOBuilder = builder


class _Handle:
    """DeepSpeed's ``aio_handle``, as far as its swapper calls it. A path is no more than a name."""

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._pending: list[list[Future[None]]] = []
        self._buffers: dict[int, int] = {}
        """First address -> bytes."""

    def async_pwrite(self, values: Tensor, path: str, file_offset: int) -> int:
        """Begin to write; 0 says that it has begun."""
        assert file_offset == 0, "a name holds one tensor"
        self._pending.append(self._space.file.write(path, values))
        return 0

    def async_pread(self, out: Tensor, path: str, file_offset: int) -> int:
        """Begin to read; 0 says that it has begun."""
        assert file_offset == 0, "a name holds one tensor"
        self._pending.append(self._space.file.read(path, out))
        return 0

    def wait(self) -> int:
        """Finish what was begun; returns how many tensors that were. OSError for the first that failed."""
        pending, self._pending = self._pending, []
        for futures in pending:
            for future in futures:
                future.result()
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example: Tensor) -> Tensor:
        """A buffer of ``num_elem`` values of the example's dtype."""
        buffer = self._space.empty(num_elem, example.dtype)
        self._buffers[buffer.data_ptr()] = buffer.nbytes
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Forget a buffer; False where it is none."""
        return self._buffers.pop(buffer.data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the tensor lies in one of the buffers: the swapper copies any other into one."""
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= first and last <= start + size for start, size in self._buffers.items())
