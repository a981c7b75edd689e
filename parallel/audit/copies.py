"""Copies of a call's tensors that are sent as bytes and keep their memory layout on another rank.

A library may sum in another order if a matrix has other strides, or another offset within a cache line. So a copy keeps
both: the same call then gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longctx.tensor_bytes import as_bytes

_LINE_BYTES = 64
"""A cache line, and the widest vector: what a kernel may ask of an address."""


class Layout(NamedTuple):
    """Layout of a tensor in memory."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    phase: int
    """Its address modulo a cache line, in bytes."""
    on_cpu: bool
    """Also where the run computes on a GPU: tables and counters."""

    @classmethod
    def of(cls, x: Tensor) -> Layout:
        """Return the layout of a tensor."""
        return cls(tuple(x.shape), tuple(x.stride()), x.dtype, x.data_ptr() % _LINE_BYTES, x.device.type == "cpu")

    @property
    def distinct_shape(self) -> tuple[int, ...]:
        """Shape with size 1 for expanded axes."""
        return tuple(1 if step == 0 else size for size, step in zip(self.shape, self.stride, strict=True))

    @property
    def span_bytes(self) -> int:
        """Bytes from the first value to the last one, including gaps."""
        if 0 in self.shape:
            return 0
        steps = zip(self.shape, self.stride, strict=True)
        return (1 + sum((size - 1) * step for size, step in steps)) * self.dtype.itemsize


class Copied(NamedTuple):
    """Layout and values of a tensor."""

    layout: Layout
    values: Tensor
    """Flat, in the order of the axes."""

    @classmethod
    def of(cls, x: Tensor) -> Copied:
        """Return a copy of a tensor, on its device."""
        layout = Layout.of(x)
        return cls(layout, _distinct(x, layout).clone(memory_format=torch.contiguous_format).flatten())

    def laid_out(self, device: torch.device) -> Tensor:
        """Return the tensor in memory of its own, with its strides and its offset within a cache line.

        ``device`` is that of the run.
        """
        layout = self.layout
        if layout.on_cpu:
            device = torch.device("cpu")
        buffer = torch.empty(layout.span_bytes + 2 * _LINE_BYTES, dtype=torch.uint8, device=device)
        # The allocator's memory is aligned, and the original may not have been: a part of a flat buffer.
        start = (layout.phase - buffer.data_ptr()) % _LINE_BYTES
        x = buffer[start : start + layout.span_bytes].view(layout.dtype).as_strided(layout.shape, layout.stride)
        _distinct(x, layout).copy_(self.values.to(device).view(layout.distinct_shape))
        return x


def _distinct(x: Tensor, layout: Layout) -> Tensor:
    """Return the tensor with one of each value that an expanded axis repeats."""
    for dim, size in enumerate(layout.distinct_shape):
        x = x.narrow(dim, 0, size)
    return x


class Slot(NamedTuple):
    """Place of a tensor among the arguments of a call."""

    number: int


def take_apart(values: Any, tensors: list[Tensor]) -> Any:
    """Return the arguments with a slot for each tensor; append the tensors to ``tensors``."""
    if isinstance(values, Tensor):
        tensors.append(values)
        return Slot(len(tensors) - 1)
    if isinstance(values, dict):
        return {name: take_apart(value, tensors) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [take_apart(value, tensors) for value in values]
    return values


def put_together(values: Any, tensors: Sequence[Tensor]) -> Any:
    """Return the arguments with their tensors: the inverse of ``take_apart``."""
    if isinstance(values, Slot):
        return tensors[values.number]
    if isinstance(values, dict):
        return {name: put_together(value, tensors) for name, value in values.items()}
    if isinstance(values, list):
        return [put_together(value, tensors) for value in values]
    return values


def joined_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return flat tensors, concatenated as bytes in CPU memory."""
    return torch.cat([torch.empty(0, dtype=torch.uint8)] + [as_bytes(x.cpu()) for x in tensors])


def from_bytes(data: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return the tensors of ``joined_bytes``, flat, with the sizes and dtypes of ``like``."""
    parts = data.split([x.nbytes for x in like])
    # Copies: a part of the buffer may be unaligned for its dtype.
    return [part.clone().view(x.dtype) for part, x in zip(parts, like, strict=True)]
