"""Tensors of a layer that survive from forward to backward, on the device or in the host's memory.

``HostStore`` moves tensors to the host as layers save them, and back one layer before backward comes to them. On a GPU
the host waits for none of the copies (``longctx.model.copies``), and a layer's computation hides its neighbour's.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from longctx.model.copies import Copies, FromHost, HostTensor, Mark

Keep = Literal["all", "attention", "inputs"]
"""What survives: everything that backward reads; layers' inputs and the results of attention; inputs alone. Of a layer
of experts the last two keep their ids as well, and the second its output where a norm reads it."""
Store = Literal["device", "host", "disk"]
"""Where that lives until backward; a disk with chunks of tokens alone."""


class HostStore:
    """Store in the host's memory of the tensors that the layers of one forward pass save for backward.

    The last layer's stay on the device: backward needs them at once. So do tensors that several layers share, and
    weights. Equal bits come back, with equal strides: full storages are moved, and one that a layer saves twice is
    moved once.
    """

    def __init__(self, copies: Copies, num_layers: int, *, least_bytes: int, shared: Sequence[Tensor] = ()) -> None:
        """Create the store; storages of fewer than ``least_bytes`` and of ``shared`` tensors stay on the device."""
        self._copies, self._last, self._least_bytes = copies, num_layers - 1, least_bytes
        self._shared = {x.untyped_storage()._cdata for x in shared}
        self._layer: _Layer | None = None
        """The one whose forward pass is under way."""
        self._newest: _Layer | None = None

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Move tensors that autograd saves in a layer's forward pass, or that are ``put`` in it, to the host."""
        earlier = self._newest
        layer = _Layer(self._copies, earlier, stays=number == self._last)
        self._layer = self._newest = layer
        try:
            with saved_tensors_hooks(self._put_saved, on_device):
                yield
        finally:
            self._layer = None
            # Its copies had the time of this layer's computation. The computation waits for them here, which bounds the
            # memory on its way: if it were free "once it is copied", that would be when the host asks, far too early.
            if earlier is not None:
                earlier.release()

    def put(self, x: Tensor) -> Any:
        """Move x, which has no history; return an object for ``on_device``, or x itself if it is not moved."""
        if self._layer is None or not self._moves(x):
            return x
        return self._layer.put(x)

    def _put_saved(self, x: Tensor) -> Any:
        # The parameter itself: ZeRO-3 frees a gathered weight by emptying it, and gathers it again for backward.
        if isinstance(x, nn.Parameter):
            return x
        # Without history: a node that saves its own result would otherwise hold itself.
        detached = x.detach()
        # A transposed weight, as a product saves it. Only x itself knows its base.
        if isinstance(x._base, nn.Parameter):
            return detached
        return self.put(detached)

    def _moves(self, x: Tensor) -> bool:
        storage = x.untyped_storage()
        if x.device.type != self._copies.device.type or storage.nbytes() < self._least_bytes:
            return False
        return storage._cdata not in self._shared


def on_device(x: Any) -> Tensor:
    """Return the tensor that was given to ``HostStore.put``, or that autograd saved."""
    if isinstance(x, Tensor):
        return x
    return x.on_device()


class _Layer:
    """Tensors that one layer has moved to the host."""

    def __init__(self, copies: Copies, earlier: _Layer | None, *, stays: bool) -> None:
        self.copies, self.earlier, self._stays = copies, earlier, stays
        self._copied: Mark = None
        """Marks that all of it has left the device."""
        self._fetched = False
        self._storages: list[weakref.ref[_Storage]] = []
        # Until release: device memory that is being copied, and its copy.
        self._leaving: dict[tuple[int, int, torch.dtype], tuple[Tensor, _Storage]] = {}

    def put(self, x: Tensor) -> _Moved | _Stayed:
        if self._stays:
            return _Stayed(self, x)
        storage = x.untyped_storage()
        # The version too: a storage that is written to between two saves is two storages.
        key = (storage._cdata, x._version, x.dtype)
        if key not in self._leaving:
            # As HostTensor has it: one row.
            whole = x.as_strided((1, storage.nbytes() // x.itemsize), (1, 1), 0)
            moved = _Storage(self, HostTensor(self.copies, whole.shape, whole.dtype))
            self._copied = moved.host.write(slice(0, whole.shape[1]), whole)
            self._leaving[key] = (whole, moved)
            self._storages.append(weakref.ref(moved))
        moved = self._leaving[key][1]
        moved.parts += 1
        return _Moved(moved, x.shape, x.stride(), int(x.storage_offset()))

    def release(self) -> None:
        """Release the device memory, once it is copied."""
        self.copies.wait(self._copied)
        self._leaving.clear()

    def fetch(self) -> None:
        """Start to bring back the tensors that backward still needs."""
        if self._fetched:
            return
        self._fetched = True
        for reference in self._storages:
            moved = reference()
            if moved is not None:
                moved.fetch()

    def reached(self) -> None:
        """Start to bring back this layer's tensors, which backward has reached, and its neighbour's."""
        self.fetch()
        # One layer ahead of its need: this layer's backward hides the copies.
        if self.earlier is not None:
            self.earlier.fetch()


class _Storage:
    """One storage in the host's memory, and on the device while backward reads it."""

    def __init__(self, layer: _Layer, host: HostTensor) -> None:
        self._layer, self.host = layer, host
        self.parts = 0
        """Saved tensors that lie in it."""
        self._device: FromHost | None = None
        self._taken = 0

    def fetch(self) -> None:
        self._device = self.host.whole()

    def take(self) -> Tensor:
        """Return the storage on the device. With the last of its parts this object releases it."""
        self._layer.reached()
        if self._device is None:  # backward comes a second time
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
    """Saved tensor of the last layer."""

    layer: _Layer
    tensor: Tensor

    def on_device(self) -> Tensor:
        self.layer.reached()
        return self.tensor
