"""Copies of a call's tensors that are sent as bytes and keep their memory layout on another rank.

A library may sum in another order if a matrix has other strides, or another offset within a cache line. A copy keeps
both, so that the same call gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.tensor_bytes import as_bytes

_LINE_BYTES = 64
"""Cache line size and widest vector: the alignment on which a kernel may depend."""


class MemoryLayout(NamedTuple):
    """Memory layout of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    phase: int
    """Address modulo the cache line, in bytes."""
    on_cpu: bool
    """True for tables and counters on the CPU, also if the run computes on a GPU."""

    @classmethod
    def of(cls, x: Tensor) -> MemoryLayout:
        """Return the tensor's layout."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.data_ptr() % _LINE_BYTES, x.device.type == "cpu")

    @property
    def distinct_shape(self) -> tuple[int, ...]:
        """Shape with size 1 for expanded dims."""
        return tuple(1 if step == 0 else size for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def span_bytes(self) -> int:
        """Bytes from the first value to the last, including gaps."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * self.dtype.itemsize


class Copied(NamedTuple):
    """Layout and values of a tensor."""

    layout: MemoryLayout
    values: Tensor
    """Flat, in dim order."""

    @classmethod
    def of(cls, x: Tensor) -> Copied:
        """Copy a tensor on its device."""
        layout = MemoryLayout.of(x)
        return cls(layout, _distinct(x, layout).clone(memory_format=torch.contiguous_format).flatten())

    def laid_out(self, device: torch.device) -> Tensor:
        """Rebuild the tensor in new memory, with its strides and its offset within a cache line.

        ``device`` is the run's device.
        """
        layout = self.layout
        if layout.on_cpu:
            device = torch.device("cpu")
        buffer = torch.empty(layout.span_bytes + 2 * _LINE_BYTES, dtype=torch.uint8, device=device)
        # The allocator's memory is aligned, but the original may not have been, such as a part of a flat buffer.
        start = (layout.phase - buffer.data_ptr()) % _LINE_BYTES
        x = buffer[start : start + layout.span_bytes].view(layout.dtype).as_strided(layout.shape, layout.stride)
        _distinct(x, layout).copy_(self.values.to(device).view(layout.distinct_shape))
        return x


def _distinct(x: Tensor, layout: MemoryLayout) -> Tensor:
    """Return the tensor with size 1 in expanded dims, which repeat values."""
    for dim, size in enumerate(layout.distinct_shape):
        x = x.narrow(dim, 0, size)
    return x


class TensorSlot(NamedTuple):
    """Placeholder for a tensor among a call's arguments."""

    number: int


def extract_tensors(values: Any, tensors: list[Tensor]) -> Any:
    """Replace each tensor in the arguments by a slot; append the tensors to ``tensors``."""
    if isinstance(values, Tensor):
        tensors.append(values)
        return TensorSlot(len(tensors) - 1)
    if isinstance(values, dict):
        return {name: extract_tensors(value, tensors) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [extract_tensors(value, tensors) for value in values]
    return values


def insert_tensors(values: Any, tensors: Sequence[Tensor]) -> Any:
    """Replace the slots by their tensors: the inverse of ``extract_tensors``."""
    if isinstance(values, TensorSlot):
        return tensors[values.number]
    if isinstance(values, dict):
        return {name: insert_tensors(value, tensors) for name, value in values.items()}
    if isinstance(values, list):
        return [insert_tensors(value, tensors) for value in values]
    return values


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate flat tensors as bytes in CPU memory."""
    return torch.cat([torch.empty(0, dtype=torch.uint8)] + [as_bytes(x.cpu()) for x in tensors])


def from_bytes(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Split bytes from ``joined_bytes`` into flat tensors with the sizes and dtypes in ``like``."""
    parts = data.split([x.nbytes for x in like])
    # Clone: a part of the buffer may be unaligned for its dtype.
    return [part.clone().view(x.dtype) for part, x in zip(parts, like, strict=True)]
