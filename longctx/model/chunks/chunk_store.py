"""Stores for a chunked layer's values over all its tokens: on the device, or in host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from longctx.model.async_copies import AsyncCopies, FromHost, HostTensor, InFlightTensors, of_tokens
from longctx.model.experts.dispatch import Pending, Ready

PendingTensor = Pending[Tensor]
"""Values [B, c, …] in flight to the device; read-only."""


class Stored(Protocol):
    """Values for all tokens of this rank, [B, t, …]."""

    def write(self, tokens: slice, x: Tensor) -> None:
        """Set some tokens' values [B, c, …]. The store takes ownership: the tensor must not be written to again."""
        ...

    def fetch(self, tokens: slice) -> PendingTensor:
        """Start to fetch some tokens' values to the device."""
        ...

    def whole(self) -> PendingTensor:
        """Start to fetch all tokens' values to the device."""
        ...


class ChunkStore(Protocol):
    """Factory for places that hold values for all tokens."""

    def empty(self, num_tokens: int, like: Tensor) -> Stored:
        """Create a place for ``num_tokens`` tokens that are read all at once; ``like`` [B, c, …] holds some of them."""
        ...

    def empty_chunks(self, num_tokens: int, like: Tensor) -> Stored:
        """Create a place for values that are read in the same chunks in which they are written."""
        ...

    def put(self, x: Tensor) -> Stored:
        """Store values x [B, t, …] for all tokens, which are on the device."""
        ...


# Double buffering: while a chunk is computed, the next chunk's values are in flight to the device and the previous
# chunk's results on their way back.
def in_turn(chunks: Sequence[slice], stored: Sequence[Stored]) -> Iterator[tuple[slice, list[Tensor]]]:
    """Yield each chunk with its values on the device, while the next chunk's are in flight."""
    pending = [values.fetch(chunks[0]) for values in stored]
    for number, tokens in enumerate(chunks):
        received = [values.wait() for values in pending]
        if number + 1 < len(chunks):
            pending = [values.fetch(chunks[number + 1]) for values in stored]
        yield tokens, received


class PutOnce:
    """Store that puts a tensor only once if several callers put it."""

    def __init__(self, store: ChunkStore) -> None:
        self._store = store
        self._put: list[tuple[Tensor, Stored]] = []

    def put(self, x: Tensor) -> Stored:
        """Store values x for all tokens."""
        for previous, stored in self._put:
            if _are_one(previous, x):
                return stored
        stored = self._store.put(x)
        self._put.append((x, stored))
        return stored

    def clear(self) -> None:
        """Release the references to tensors that were put."""
        self._put.clear()


def _are_one(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are equal views of the same memory."""
    if (x.dtype, x.shape, x.stride(), x.storage_offset()) != (y.dtype, y.shape, y.stride(), y.storage_offset()):
        return False
    return x.untyped_storage()._cdata == y.untyped_storage()._cdata


class DeviceStore:
    """Store on the device."""

    def empty(self, num_tokens: int, like: Tensor) -> InOnePlace:
        return InOnePlace(like.new_empty(of_tokens(like.shape, num_tokens)))

    def empty_chunks(self, num_tokens: int, like: Tensor) -> OnDevice:
        return OnDevice(None)

    def put(self, x: Tensor) -> OnDevice:
        return OnDevice(x)


class OnDevice:
    """Values for all tokens on the device, as they were computed, without copies or waits."""

    def __init__(self, whole: Tensor | None) -> None:
        """Set all values (``whole``), which chunks may replace; None if there are only chunks."""
        self._whole = whole
        self._chunks: dict[int, Tensor] = {}
        """Maps a chunk's first token to its values."""

    def write(self, tokens: slice, x: Tensor) -> None:
        # A part of a larger tensor would keep all its memory alive.
        if x.untyped_storage().nbytes() > x.nbytes:
            x = x.clone(memory_format=torch.contiguous_format)
        self._chunks[tokens.start] = x
        if self._whole is not None and sum(chunk.shape[1] for chunk in self._chunks.values()) == self._whole.shape[1]:
            self._whole = None

    def fetch(self, tokens: slice) -> Ready[Tensor]:
        if tokens.start in self._chunks:
            return Ready(self._chunks[tokens.start])
        # Reached if a core's backward returns no gradient for q, k and v.
        assert self._whole is not None, "missing chunk: a core's backward must return gradients for q, k and v"
        return Ready(self._whole[:, tokens])

    def whole(self) -> Ready[Tensor]:
        return Ready(self.on_device())

    def on_device(self) -> Tensor:
        if not self._chunks:
            assert self._whole is not None, "nothing was written"
            return self._whole
        chunks = [self._chunks[start] for start in sorted(self._chunks)]
        assert self._whole is None, "some chunks were not written"
        if len(chunks) == 1:
            return chunks[0]
        return torch.cat(chunks, dim=1)


class InOnePlace:
    """Values for all tokens on the device, in one tensor."""

    def __init__(self, values: Tensor) -> None:
        self._values = values

    def write(self, tokens: slice, x: Tensor) -> None:
        self._values[:, tokens] = x

    def fetch(self, tokens: slice) -> Ready[Tensor]:
        return Ready(self._values[:, tokens])

    def whole(self) -> Ready[Tensor]:
        return Ready(self._values)


class HostMemory:
    """Store in host memory, page-locked for a GPU, with copies that overlap its computation."""

    def __init__(self, copies: AsyncCopies) -> None:
        self.copies, self.in_flight = copies, InFlightTensors(copies)

    def empty(self, num_tokens: int, like: Tensor) -> InHostMemory:
        return InHostMemory(self, HostTensor(self.copies, of_tokens(like.shape, num_tokens), like.dtype))

    empty_chunks = empty

    def put(self, x: Tensor) -> InHostMemory:
        stored = self.empty(x.shape[1], x)
        stored.write(slice(0, x.shape[1]), x)
        return stored


class InHostMemory:
    """Values for all tokens in host memory."""

    def __init__(self, store: HostMemory, host: HostTensor) -> None:
        self._store, self._host = store, host

    def write(self, tokens: slice, x: Tensor) -> None:
        x = x.contiguous()
        self._store.in_flight.hold(x, self._host.write(tokens, x))

    def fetch(self, tokens: slice) -> FromHost:
        return self._host.fetch(tokens)

    def whole(self) -> FromHost:
        return self._host.whole()

    def on_device(self) -> Tensor:
        return self.whole().wait()
