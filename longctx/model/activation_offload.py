"""Activation offload: tensors that survive from a layer's forward to its backward, on the device or on the host."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from longctx.model.async_copies import AsyncCopies, FromHost, HostTensor, Mark

Keep = Literal["all", "attention", "inputs"]
"""Tensors that survive: all that backward reads; layer inputs and attention results; or inputs alone. In an expert
layer the last two also keep expert ids, and "attention" keeps the output if a norm reads it."""
Store = Literal["device", "host", "disk"]
"""Where they stay until backward; "disk" only with token chunks."""


# Offload with one layer of lookahead. Forward copies a layer's saved tensors to host memory while the next layer
# computes, then frees their device memory. Backward starts the copies for the layer below as soon as it reaches a
# layer. So each layer's computation hides its neighbour's copies, and the device holds about two layers' tensors. On a
# GPU only the device waits for copies, never the host (``longctx.model.async_copies``).
class HostStore:
    """Host memory for tensors that layers save for backward in one forward pass.

    The last layer's tensors stay on the device, since backward needs them at once; so do weights and tensors that
    several layers share. Tensors return with equal bits and strides: full storages are moved, and one that a layer
    saves twice is moved once.
    """

    def __init__(
        self, copies: AsyncCopies, num_layers: int, *, least_bytes: int, shared: Sequence[Tensor] = ()
    ) -> None:
        """Create the store; storages under ``least_bytes`` and ``shared`` tensors stay on the device."""
        self._copies, self._last, self._least_bytes = copies, num_layers - 1, least_bytes
        self._shared = {x.untyped_storage()._cdata for x in shared}
        self._layer: _Layer | None = None
        """The layer now in its forward pass."""
        self._newest: _Layer | None = None

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Move tensors that autograd saves in a layer's forward pass, or that are ``put`` during it, to the host."""
        previous = self._newest
        layer = _Layer(self._copies, previous, stays=number == self._last)
        self._layer = self._newest = layer
        try:
            with saved_tensors_hooks(self._put_saved, on_device):
                yield
        finally:
            self._layer = None
            # The previous layer's copies overlapped this layer's computation. The device waits for them here, which
            # bounds memory in flight; the host runs ahead and would ask for completion far too early.
            if previous is not None:
                previous.release()

    def put(self, x: Tensor) -> Any:
        """Move x, which has no history; return an object for ``on_device``, or x itself if it stays."""
        if self._layer is None or not self._moves(x):
            return x
        return self._layer.put(x)

    def _put_saved(self, x: Tensor) -> Any:
        # The parameter itself: ZeRO-3 frees a gathered weight by emptying it, and gathers it again for backward.
        if isinstance(x, nn.Parameter):
            return x
        # Detached: a node that saves its own result would otherwise hold itself.
        detached = x.detach()
        # A matmul saves a transposed weight as a view; only x itself knows its base.
        if isinstance(x._base, nn.Parameter):
            return detached
        return self.put(detached)

    def _moves(self, x: Tensor) -> bool:
        storage = x.untyped_storage()
        if x.device.type != self._copies.device.type or storage.nbytes() < self._least_bytes:
            return False
        return storage._cdata not in self._shared


def on_device(x: Any) -> Tensor:
    """Return the tensor that was passed to ``HostStore.put`` or saved by autograd."""
    if isinstance(x, Tensor):
        return x
    return x.on_device()


class _Layer:
    """One layer's tensors on the host."""

    def __init__(self, copies: AsyncCopies, previous: _Layer | None, *, stays: bool) -> None:
        self.copies, self.previous, self._stays = copies, previous, stays
        self._copied: Mark = None
        """Mark after the last copy to the host."""
        self._fetched = False
        self._storages: list[weakref.ref[_Storage]] = []
        # Until release: device memory that is being copied, and its copy.
        self._pending_copies: dict[tuple[int, int, torch.dtype], tuple[Tensor, _Storage]] = {}

    def put(self, x: Tensor) -> _Moved | _Stayed:
        if self._stays:
            return _Stayed(self, x)
        storage = x.untyped_storage()
        # The key has the version too: a storage that is written between two saves counts as two.
        key = (storage._cdata, x._version, x.dtype)
        if key not in self._pending_copies:
            # HostTensor expects rows: here a single one.
            whole = x.as_strided((1, storage.nbytes() // x.itemsize), (1, 1), 0)
            moved = _Storage(self, HostTensor(self.copies, whole.shape, whole.dtype))
            self._copied = moved.host.write(slice(0, whole.shape[1]), whole)
            self._pending_copies[key] = (whole, moved)
            self._storages.append(weakref.ref(moved))
        moved = self._pending_copies[key][1]
        moved.parts += 1
        return _Moved(moved, x.shape, x.stride(), int(x.storage_offset()))

    def release(self) -> None:
        """Release the device memory once it is copied."""
        self.copies.wait(self._copied)
        self._pending_copies.clear()

    def fetch(self) -> None:
        """Start to fetch the tensors that backward still needs."""
        if self._fetched:
            return
        self._fetched = True
        for reference in self._storages:
            moved = reference()
            if moved is not None:
                moved.fetch()

    def reached(self) -> None:
        """Start to fetch this layer's tensors, which backward has reached, and the previous layer's."""
        self.fetch()
        # Prefetched one layer early: this layer's backward hides the copies.
        if self.previous is not None:
            self.previous.fetch()


class _Storage:
    """One storage in host memory, and on the device while backward reads it."""

    def __init__(self, layer: _Layer, host: HostTensor) -> None:
        self._layer, self.host = layer, host
        self.parts = 0
        """Number of saved tensors that view it."""
        self._device: FromHost | None = None
        self._taken = 0

    def fetch(self) -> None:
        self._device = self.host.whole()

    def take(self) -> Tensor:
        """Return the storage on the device; taking its last part releases it."""
        self._layer.reached()
        if self._device is None:  # a second backward pass
            self.fetch()
        assert self._device is not None
        whole = self._device.wait()
        self._taken += 1
        if self._taken == self.parts:
            self._taken, self._device = 0, None
        return whole


@dataclass(frozen=True, eq=False)
class _Moved:
    """Saved tensor in a storage on the host."""

    storage: _Storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def on_device(self) -> Tensor:
        return self.storage.take().as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, eq=False)
class _Stayed:
    """Saved tensor from the last layer."""

    layer: _Layer
    tensor: Tensor

    def on_device(self) -> Tensor:
        self.layer.reached()
        return self.tensor
