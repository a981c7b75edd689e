"""``WeightSwapper``: this rank's parts of stage 3's weights in a ``SwapFile``, read before they are gathered.

It takes the place of DeepSpeed's ``AsyncPartitionedParameterSwapper``, which ends in an assertion as soon as more
weights are gathered than it has buffers, or as a weight is prefetched that is used twice.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus
from torch import Tensor

from parallel.zero.swapping import SwapSpace

LEAST_BYTES = 1 << 20
"""Smaller parts stay in memory, as DeepSpeed's optimiser state does: they are not worth a transfer."""


class WeightSwapper:
    """What DeepSpeed calls of a swapper, under its names. Parameters (``Any``) bear the marks that it gives them."""

    def __init__(self, space: SwapSpace, dtype: torch.dtype, *, persistence_threshold: int) -> None:
        """Parts of at most ``persistence_threshold`` values may belong to a parameter that stays whole: they stay."""
        self._space, self._dtype, self._threshold = space, dtype, persistence_threshold
        self._reading: dict[Any, tuple[Tensor, list[Future[None]]]] = {}
        """Parameters whose parts are on their way from the disk."""
        self._held: dict[Any, None] = {}
        """Parameters whose parts are in memory, in order."""

    # ---------------------------------------------------------------------------------------- what DeepSpeed calls

    def swappable_tensor(self, *, numel: int) -> bool:
        """Whether a part of so many values goes to the disk."""
        return numel > self._threshold and numel * self._dtype.itemsize >= LEAST_BYTES

    def get_buffer(self, param: Any, numel: int) -> Tensor:
        """Memory for a part that is about to be written."""
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
        """Finish what ``swap_in`` has begun. OSError where the disk fails."""
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
        """How many parts a prefetch may read: what bounds it is ``prefetch_bucket_size``."""
        return sys.maxsize

    def reserve_partitioned_swap_space(self, partition_num_elems: Sequence[int]) -> None:
        """Nothing: values go to the disk from where they are."""

    # ---------------------------------------------------------------------------------------------------- our own

    def release_all(self) -> None:
        """Free the memory of every part that is not gathered, such as one that was prefetched and not used."""
        self.synchronize_reads()
        self.remove_partition_and_release_buffers(list(self._held))

    def part(self, param: Any) -> Tensor:
        """The values of a part, from memory or the disk; the parameter stays as it is."""
        self.synchronize_reads()
        if param.ds_tensor.status == PartitionedParamStatus.AVAILABLE:
            return param.ds_tensor
        out = self._space.empty(param.ds_tensor.ds_numel, self._dtype)
        for future in self._space.file.read(_name(param), out):
            future.result()
        return out

    def _write(self, parts: Iterable[tuple[Any, Tensor]]) -> None:
        """Write parts, one after the other. OSError where the disk is full or fails."""
        for p, values in parts:
            for future in self._space.file.write(_name(p), values):
                future.result()


def _name(param: Any) -> str:
    return f"weight {param.ds_id}"
