"""State in a ``SwapFile``: the I/O handle of DeepSpeed's swapper of optimiser state, and our own swapper of weights.

DeepSpeed's own handle (``async_io``) counts transfers that have ended and checks none of their results: if a disk is
full or fails, it continues with the old contents of memory. Nor does it start without libaio and a compiler.
"""

from __future__ import annotations

import mmap
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor import partitioned_optimizer_swapper
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from torch import Tensor

from longctx.swap_file import SwapFile
from parallel.zero.options import ZeroOptions

LEAST_BYTES = 1 << 20
"""Smaller parts of weights stay in memory, as DeepSpeed's optimiser state does: they are not worth a transfer."""


@dataclass(frozen=True, kw_only=True)
class SwapSpace:
    """Space that a rank's state is swapped to."""

    file: SwapFile
    path: str
    """Folder that DeepSpeed wants to be given; nothing is ever written there."""
    pin_memory: bool
    """Whether memory that transfers go through is page-locked; False on CPUs, where no device copies from it."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return memory that the file needs no copy for."""
        if self.pin_memory:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        # Full pages: a tensor of PyTorch's own does not begin at one.
        return torch.frombuffer(mmap.mmap(-1, max(1, numel) * dtype.itemsize), dtype=dtype, count=numel)


@contextmanager
def swap_space(zero: ZeroOptions) -> Iterator[SwapSpace | None]:
    """Make DeepSpeed's engine that starts within the block swap to a file of its own; yield None if it swaps nothing.

    Raise OSError if ``nvme_path`` cannot be written.
    """
    if not zero.swaps:
        yield None
        return
    accelerator: Any = get_accelerator()
    Path(zero.nvme_path).mkdir(parents=True, exist_ok=True)
    pin_memory = zero.pin_memory and accelerator.device_name() != "cpu"
    # DeepSpeed creates folders and removes their contents: here no run uses those of another.
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
    """Replacement of DeepSpeed's ``aio_handle``, as far as its swapper calls it. A path is only a name."""

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._pending: list[list[Future[None]]] = []
        self._buffers: dict[int, int] = {}
        """First address -> bytes."""

    def async_pwrite(self, values: Tensor, path: str, file_offset: int) -> int:
        """Begin to write; return 0 once it has begun."""
        assert file_offset == 0, "a name holds one tensor"
        self._pending.append(self._space.file.write(path, values))
        return 0

    def async_pread(self, out: Tensor, path: str, file_offset: int) -> int:
        """Begin to read; return 0 once it has begun."""
        assert file_offset == 0, "a name holds one tensor"
        self._pending.append(self._space.file.read(path, out))
        return 0

    def wait(self) -> int:
        """Finish all transfers, and return the number of tensors. Raise OSError for the first that failed."""
        pending, self._pending = self._pending, []
        for futures in pending:
            for future in futures:
                future.result()
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example: Tensor) -> Tensor:
        """Return a buffer of ``num_elem`` values of the example's dtype."""
        buffer = self._space.empty(num_elem, example.dtype)
        self._buffers[buffer.data_ptr()] = buffer.nbytes
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Forget a buffer; return False if it is not one."""
        return self._buffers.pop(buffer.data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return whether the tensor is in one of the buffers: the swapper copies any other into one."""
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= first and last <= start + size for start, size in self._buffers.items())


class WeightSwapper:
    """This rank's parts of stage 3's weights in a ``SwapFile``, read before they are gathered.

    It replaces DeepSpeed's ``AsyncPartitionedParameterSwapper``, under its names: that one fails an assertion as soon
    as more weights are gathered than it has buffers, or if a weight that is used twice is prefetched. Parameters
    (``Any``) have the marks that DeepSpeed gives them.
    """

    def __init__(self, space: SwapSpace, dtype: torch.dtype, *, persistence_threshold: int) -> None:
        """Keep parts of at most ``persistence_threshold`` values: they may belong to a parameter that stays full."""
        self._space, self._dtype, self._threshold = space, dtype, persistence_threshold
        self._reading: dict[Any, tuple[Tensor, list[Future[None]]]] = {}
        """Parameters whose parts are on their way from the disk."""
        self._held: dict[Any, None] = {}
        """Parameters whose parts are in memory, in order."""

    # ----------------------------------------------------------------------------------------- called by DeepSpeed

    def swappable_tensor(self, *, numel: int) -> bool:
        """Return whether a part of so many values goes to the disk."""
        return numel > self._threshold and numel * self._dtype.itemsize >= LEAST_BYTES

    def get_buffer(self, param: Any, numel: int) -> Tensor:
        """Return memory for a part that is about to be written."""
        return self._space.empty(numel, self._dtype)

    def swap_out_and_release(self, params: Sequence[Any]) -> None:
        """Write parts, and free their memory."""
        self._write((p, p.ds_tensor.data) for p in params)
        self.remove_partition_and_release_buffers(params)

    def swap_out_partitioned_params(self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[Tensor]) -> None:
        """Write new values of parts, which are given as float32."""
        self._write((p, x.to(self._dtype)) for p, x in zip(dst_fp16_params, src_fp32_params, strict=True))

    def swap_in(self, params: Sequence[Any], async_op: bool = True) -> None:
        """Begin to read parts; unless ``async_op``, finish it."""
        for p in params:
            # A prefetch names a parameter once for each of its uses to come.
            if p not in self._reading and p not in self._held:
                buffer = self._space.empty(p.ds_tensor.ds_numel, self._dtype)
                self._reading[p] = buffer, self._space.file.read(_name(p), buffer)
                p.ds_tensor.status = PartitionedParamStatus.INFLIGHT
        if not async_op:
            self.synchronize_reads()

    def synchronize_reads(self) -> None:
        """Finish the reads that ``swap_in`` has begun. Raise OSError if the disk fails."""
        for p, (buffer, futures) in self._reading.items():
            for future in futures:
                future.result()
            p.ds_tensor.data = buffer
            p.ds_tensor.status = PartitionedParamStatus.AVAILABLE
            self._held[p] = None
        self._reading.clear()

    def remove_partition_and_release_buffers(self, params: Iterable[Any]) -> None:
        """Free the memory of parts, which are on the disk."""
        for p in params:
            self._held.pop(p, None)
            p.ds_tensor.data = torch.empty(0, dtype=self._dtype)
            p.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def available_swap_in_buffers(self) -> int:
        """Return how many parts a prefetch may read: no limit, since ``prefetch_bucket_size`` bounds it."""
        return sys.maxsize

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Do nothing: values go to the disk from their own memory."""

    # ---------------------------------------------------------------------------------------------------- our own

    def release_all(self) -> None:
        """Free the memory of every part that is not gathered, such as one that was prefetched and not used."""
        self.synchronize_reads()
        self.remove_partition_and_release_buffers(list(self._held))

    def part(self, param: Any) -> Tensor:
        """Return the values of a part, from memory or the disk; the parameter stays as it is."""
        self.synchronize_reads()
        if param.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
            return param.ds_tensor
        out = self._space.empty(param.ds_tensor.ds_numel, self._dtype)
        for future in self._space.file.read(_name(param), out):
            future.result()
        return out

    def _write(self, parts: Iterable[tuple[Any, Tensor]]) -> None:
        """Write parts, one after the other. Raise OSError if the disk is full or fails."""
        for p, values in parts:
            for future in self._space.file.write(_name(p), values):
                future.result()


def _name(param: Any) -> str:
    return f"weight {param.ds_id}"
