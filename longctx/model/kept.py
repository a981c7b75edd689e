"""What survives of a layer from forward to backward, and where: on the device, or in the host's memory.

``HostStore`` moves tensors to the host as layers save them, and back one layer before backward comes to them. On a GPU
host memory is pinned and copies have a stream of their own: the host waits for none of them, and a layer's computation
hides its neighbour's copies.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

Keep = Literal["all", "attention", "inputs"]
"""What survives: everything that backward reads; layers' inputs and the results of attention; inputs alone. Of a layer
of experts the last two keep their ids as well, and the second its output where a norm reads it."""
Store = Literal["device", "host", "disk"]
"""Where that lives until backward; a disk with chunks of tokens alone."""


class HostStore:
    """Keeps in the host's memory what the layers of one forward pass save for backward.

    The last layer's stays on the device: backward wants it at once. So does what several layers share, and weights.
    Equal bits come back, with equal strides: whole storages are moved, and one that a layer saves twice is moved once.
    """

    def __init__(
        self, device: torch.device, num_layers: int, *, least_bytes: int, shared: Sequence[Tensor] = ()
    ) -> None:
        """Storages of fewer than ``least_bytes`` stay, and those of the ``shared`` tensors."""
        self._device, self._last, self._least_bytes = device, num_layers - 1, least_bytes
        self._shared = {x.untyped_storage()._cdata for x in shared}
        self._copies = Copies(device)
        self._layer: _Layer | None = None
        """The one whose forward pass is under way."""
        self._newest: _Layer | None = None

    @contextmanager
    def layer(self, number: int) -> Iterator[None]:
        """Around the forward pass of a layer: what autograd saves in it, and what is ``put``, goes to the host."""
        earlier = self._newest
        layer = _Layer(self._copies, earlier, stays=number == self._last)
        self._layer = self._newest = layer
        try:
            with saved_tensors_hooks(self._put_saved, on_device):
                yield
        finally:
            self._layer = None
            layer.copied = self._copies.mark()
            # Its copies had the time of this layer's computation. The computation waits for them here, which bounds
            # what is on its way: memory that is free "once it is copied" would be so when the host asks, far too early.
            if earlier is not None:
                earlier.release()

    def put(self, x: Tensor) -> Any:
        """What ``on_device`` makes x of, which has no history; x itself outside of a layer, or where it is shared."""
        if self._layer is None or not self._moves(x):
            return x
        return self._layer.put(x)

    def _put_saved(self, x: Tensor) -> Any:
        # The parameter itself: ZeRO-3 frees a gathered weight by emptying it, and gathers it again for backward.
        if isinstance(x, nn.Parameter):
            return x
        # Without history: a node that saves its own result would otherwise hold itself.
        detached = x.detach()
        # A weight transposed, which is what a product saves. Only x itself knows its base.
        if isinstance(x._base, nn.Parameter):
            return detached
        return self.put(detached)

    def _moves(self, x: Tensor) -> bool:
        storage = x.untyped_storage()
        if x.device.type != self._device.type or storage.nbytes() < self._least_bytes:
            return False
        return storage._cdata not in self._shared


def on_device(x: Any) -> Tensor:
    """The tensor that ``HostStore.put`` was given, or that autograd saved."""
    if isinstance(x, Tensor):
        return x
    return x.on_device()


class _Layer:
    """What one layer has moved to the host."""

    def __init__(self, copies: Copies, earlier: _Layer | None, *, stays: bool) -> None:
        self.copies, self.earlier, self._stays = copies, earlier, stays
        self.copied: Any = None
        """Marks that all of it has left the device."""
        self.arrived: Any = None
        """Marks that it is back."""
        self._fetched = False
        self._storages: list[weakref.ref[_Storage]] = []
        # Until release: device memory that is being copied, and what it is copied to.
        self._leaving: dict[tuple[int, int, torch.dtype], tuple[Tensor, _Storage]] = {}

    def put(self, x: Tensor) -> _Moved | _Stayed:
        if self._stays:
            return _Stayed(self, x)
        storage = x.untyped_storage()
        # The version too: a storage that is written to between two saves is two storages.
        key = (storage._cdata, x._version, x.dtype)
        if key not in self._leaving:
            whole = x.as_strided((storage.nbytes() // x.itemsize,), (1,), 0)
            moved = _Storage(self, self.copies.to_host(whole))
            self._leaving[key] = (whole, moved)
            self._storages.append(weakref.ref(moved))
        moved = self._leaving[key][1]
        moved.parts += 1
        return _Moved(moved, x.shape, x.stride(), int(x.storage_offset()))

    def release(self) -> None:
        """Give the device memory back, once it is copied."""
        self.copies.wait(self.copied)
        self._leaving.clear()

    def fetch(self) -> None:
        """Start to bring back what backward still wants."""
        if self._fetched:
            return
        self._fetched = True
        for reference in self._storages:
            moved = reference()
            if moved is not None:
                moved.fetch()
        self.arrived = self.copies.mark()

    def reached(self) -> None:
        """Backward has come to this layer: its tensors must be here, and its neighbour's set out."""
        self.fetch()
        self.copies.wait(self.arrived)
        # One layer ahead of its need: this layer's backward hides the copies.
        if self.earlier is not None:
            self.earlier.fetch()


class _Storage:
    """One storage in the host's memory, and on the device while backward reads it."""

    def __init__(self, layer: _Layer, host: Tensor) -> None:
        self._layer, self._host = layer, host
        self.parts = 0
        """Saved tensors that lie in it."""
        self._device: Tensor | None = None
        self._taken = 0

    def fetch(self) -> None:
        self._device = self._layer.copies.to_device(self._host)

    def take(self) -> Tensor:
        """The storage on the device. With the last of its parts this object lets go of it."""
        self._layer.reached()
        if self._device is None:  # backward comes a second time
            self.fetch()
            self._layer.copies.wait(self._layer.copies.mark())
        whole = self._device
        assert whole is not None
        self._taken += 1
        if self._taken == self.parts:
            self._taken, self._device = 0, None
        return whole

    def __del__(self) -> None:
        # Brought back and wanted by nobody: the memory must not be given away under the copy.
        if self._device is not None:
            self._layer.copies.hold(self._device)


@dataclass(frozen=True, eq=False)
class _Moved:
    """A saved tensor that lies in a storage on the host."""

    storage: _Storage
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def on_device(self) -> Tensor:
        return self.storage.take().as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, eq=False)
class _Stayed:
    """A saved tensor of the last layer."""

    layer: _Layer
    tensor: Tensor

    def on_device(self) -> Tensor:
        self.layer.reached()
        return self.tensor


class Copies:
    """Copies between a device and the host's memory, in the order in which they are asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        # On tensors without data there is a device and no stream.
        if device.type == "cuda" and torch.cuda.is_available():
            self._stream = _stream_of(device)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Memory of the host that a GPU can copy to and from, page-locked."""
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=self._device.type == "cuda")

    def to_host(self, x: Tensor) -> Tensor:
        host = self.host_memory(x.shape, x.dtype)
        self.copy(x, host)
        return host

    def copy(self, x: Tensor, host: Tensor) -> None:
        """Start to copy x to the host; its memory must stay until that is done."""
        with self._beside():
            host.copy_(x, non_blocking=True)

    def to_device(self, host: Tensor) -> Tensor:
        # Memory of the computation's stream, which waits for the copy before it reads or frees it.
        x = torch.empty(host.shape, dtype=host.dtype, device=self._device)
        with self._beside():
            return x.copy_(host, non_blocking=True)

    def mark(self) -> Any:
        """What to ``wait`` for: all copies up to now."""
        if self._stream is None:
            return None
        return self._stream.record_event()

    def wait(self, mark: Any) -> None:
        """Make the computation wait for copies; the host does not."""
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def hold(self, x: Tensor) -> None:
        """Let no one have the memory of x before the copies up to now are done."""
        if self._stream is not None:
            x.record_stream(self._stream)

    def _beside(self) -> AbstractContextManager:
        if self._stream is None:
            return nullcontext()
        # What is copied must have been computed, and what is overwritten must have been read.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        return torch.cuda.stream(self._stream)


@cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
