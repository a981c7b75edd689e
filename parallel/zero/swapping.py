"""State in a ``SwapFile``: the I/O handle for DeepSpeed's optimizer-state swapper, and our own weight swapper.

DeepSpeed's handle (``async_io``) counts completed transfers but checks none of their results: if a disk is full or
fails, training continues with stale memory. It also requires libaio and a compiler.
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
from parallel.zero.zero_options import ZeroOptions

LEAST_BYTES = 1 << 20
"""Smaller weight shards stay in memory, as in DeepSpeed's optimizer swapping: a transfer would not pay."""


@dataclass(frozen=True, kw_only=True)
class SwapSpace:
    """Space to which a rank's state is swapped."""

    file: SwapFile
    path: str
    """Folder that DeepSpeed requires; never written to."""
    pin_memory: bool
    """Whether transfer buffers are page-locked; False on CPUs, where no device copies from them."""

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Allocate memory that the file can transfer without a copy."""
        if self.pin_memory:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        # Full pages: PyTorch's own allocations are not page-aligned.
        return torch.frombuffer(mmap.mmap(-1, max(1, numel) * dtype.itemsize), dtype=dtype, count=numel)


@contextmanager
def swap_space(zero: ZeroOptions) -> Iterator[SwapSpace | None]:
    """Make a DeepSpeed engine created within the ``with`` block swap to its own file; yield None without NVMe offload.

    Raise OSError if ``nvme_path`` cannot be written.
    """
    if not zero.swaps:
        yield None
        return
    accelerator: Any = get_accelerator()
    Path(zero.nvme_path).mkdir(parents=True, exist_ok=True)
    pin_memory = zero.pin_memory and accelerator.device_name() != "cpu"
    # DeepSpeed creates folders and deletes their contents, so each run needs its own.
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
    """Replacement for DeepSpeed's ``aio_handle``, limited to its swapper's calls. A path is only a key."""

    def __init__(self, space: SwapSpace) -> None:
        self._space = space
        self._pending: list[list[Future[None]]] = []
        self._buffers: dict[int, int] = {}
        """First address -> bytes."""

    def async_pwrite(self, values: Tensor, path: str, file_offset: int) -> int:
        """Start writing; return 0 once started."""
        assert file_offset == 0, "a name holds one tensor"
        self._pending.append(self._space.file.write(path, values))
        return 0

    def async_pread(self, out: Tensor, path: str, file_offset: int) -> int:
        """Start reading; return 0 once started."""
        assert file_offset == 0, "a name holds one tensor"
        self._pending.append(self._space.file.read(path, out))
        return 0

    def wait(self) -> int:
        """Finish all transfers, and return the number of tensors. Raise OSError for the first failed transfer."""
        pending, self._pending = self._pending, []
        for futures in pending:
            for future in futures:
                future.result()
        return len(pending)

    def new_cpu_locked_tensor(self, num_elem: int, example: Tensor) -> Tensor:
        """Return a buffer with ``num_elem`` values in the example's dtype."""
        buffer = self._space.empty(num_elem, example.dtype)
        self._buffers[buffer.data_ptr()] = buffer.nbytes
        return buffer

    def free_cpu_locked_tensor(self, buffer: Tensor) -> bool:
        """Drop a buffer; return False if it is unknown."""
        return self._buffers.pop(buffer.data_ptr(), None) is not None

    def is_pinned(self, tensor: Tensor) -> bool:
        """Return True if the tensor is inside a known buffer: the swapper copies any other tensor into one."""
        first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        return any(start <= first and last <= start + size for start, size in self._buffers.items())


class WeightSwapper:
    """This rank's stage 3 weight shards in a ``SwapFile``, read ahead of gathering.

    It replaces DeepSpeed's ``AsyncPartitionedParameterSwapper``, with the same method names: that class fails an
    assertion when more weights are gathered than it has buffers, or when a weight that is used twice is prefetched.
    Parameters (``Any``) carry DeepSpeed's attributes.
    """

    def __init__(self, space: SwapSpace, dtype: torch.dtype, *, persistence_threshold: int) -> None:
        """Keep shards up to ``persistence_threshold`` values in memory: they may belong to a persistent parameter."""
        self._space, self._dtype, self._threshold = space, dtype, persistence_threshold
        self._pending_reads: dict[Any, tuple[Tensor, list[Future[None]]]] = {}
        """Parameters whose shards are being read."""
        self._held: dict[Any, None] = {}
        """Parameters whose shards are in memory, in order."""

    # ----------------------------------------------------------------------------------------- called by DeepSpeed

    def swappable_tensor(self, *, numel: int) -> bool:
        """Return True if a shard with ``numel`` values is swapped to disk."""
        return numel > self._threshold and numel * self._dtype.itemsize >= LEAST_BYTES

    def get_buffer(self, param: Any, numel: int) -> Tensor:
        """Return memory for a shard to be written."""
        return self._space.empty(numel, self._dtype)

    def swap_out_and_release(self, params: Sequence[Any]) -> None:
        """Write shards, and free their memory."""
        self._write((p, p.ds_tensor.data) for p in params)
        self.remove_partition_and_release_buffers(params)

    def swap_out_partitioned_params(self, dst_fp16_params: Sequence[Any], src_fp32_params: Sequence[Tensor]) -> None:
        """Write new shard values, given as float32."""
        self._write((p, x.to(self._dtype)) for p, x in zip(dst_fp16_params, src_fp32_params, strict=True))

    def swap_in(self, params: Sequence[Any], async_op: bool = True) -> None:
        """Start reading shards; with ``async_op=False``, finish as well."""
        for p in params:
            # A prefetch lists a parameter once per upcoming use.
            if p not in self._pending_reads and p not in self._held:
                buffer = self._space.empty(p.ds_tensor.ds_numel, self._dtype)
                self._pending_reads[p] = buffer, self._space.file.read(_name(p), buffer)
                p.ds_tensor.status = PartitionedParamStatus.INFLIGHT
        if not async_op:
            self.synchronize_reads()

    def synchronize_reads(self) -> None:
        """Finish the reads that ``swap_in`` started. Raise OSError if the disk fails."""
        for p, (buffer, futures) in self._pending_reads.items():
            for future in futures:
                future.result()
            p.ds_tensor.data = buffer
            p.ds_tensor.status = PartitionedParamStatus.AVAILABLE
            self._held[p] = None
        self._pending_reads.clear()

    def remove_partition_and_release_buffers(self, params: Iterable[Any]) -> None:
        """Free the memory of shards that are on disk."""
        for p in params:
            self._held.pop(p, None)
            p.ds_tensor.data = torch.empty(0, dtype=self._dtype)
            p.ds_tensor.status = PartitionedParamStatus.NOT_AVAILABLE

    def available_swap_in_buffers(self) -> int:
        """Return how many shards a prefetch may read: unlimited, since ``prefetch_bucket_size`` bounds it."""
        return sys.maxsize

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Do nothing: values are written directly from their own memory."""

    # ---------------------------------------------------------------------------------------------- not from DeepSpeed

    def release_all(self) -> None:
        """Free every shard in memory that is not gathered, such as one prefetched but not used."""
        self.synchronize_reads()
        self.remove_partition_and_release_buffers(list(self._held))

    def part(self, param: Any) -> Tensor:
        """Return a shard's values, from memory or disk, without changing the parameter's status."""
        self.synchronize_reads()
        if param.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
            return param.ds_tensor
        out = self._space.empty(param.ds_tensor.ds_numel, self._dtype)
        for future in self._space.file.read(_name(param), out):
            future.result()
        return out

    def _write(self, parts: Iterable[tuple[Any, Tensor]]) -> None:
        """Write shards, one after the other. Raise OSError if the disk is full or fails."""
        for p, values in parts:
            for future in self._space.file.write(_name(p), values):
                future.result()


def _name(param: Any) -> str:
    return f"weight {param.ds_id}"
