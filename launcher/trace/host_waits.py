"""``HostWaits``: code lines in a step at which the host waits for the device.

A launch takes microseconds and a kernel milliseconds: the host runs ahead, unless it asks for a value. Then the device
idles while the host catches up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from launcher.trace.live_bytes import LiveBytes, current_place
from launcher.trace.rank_trace import HostWait

_COPIES = ("aten::_to_copy", "aten::copy_")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class HostWaits:
    """Collector for host waits, and for copies that do not wait."""

    def __init__(self, pinned: LiveBytes | None = None) -> None:
        """Create a collector; ``pinned`` tracks host memory that copies reach without a wait."""
        self._pinned = pinned
        self._waits: Counter[tuple[str, str, str]] = Counter()
        self._copies: Counter[str] = Counter()
        self.copied_bytes = 0
        """Bytes copied to the device without a wait."""
        self.copied_to_host_bytes = 0
        """Bytes copied to pinned host memory without a wait."""

    @property
    def found(self) -> list[HostWait]:
        """All lines with a wait, in order of first occurrence."""
        return [HostWait(place, operator, why, times) for (place, operator, why), times in self._waits.items()]

    @property
    def copies(self) -> int:
        """Number of device copies without a wait."""
        return self._copies.total()

    def add(self, operator: str, why: str) -> HostWait:
        """Record a wait at the running line, and return it."""
        # Autograd's own gradients run without a frame from our packages.
        place = current_place() or "PyTorch's own backward"
        self._waits[place, operator, why] += 1
        return HostWait(place, operator, why)

    def see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Inspect a call before it runs."""
        name = func.name().split(".")[0]
        if name in _COPIES:
            self._see_copy(name, func, args, kwargs)
        elif name in _INDEXED:
            self._see_index(name, args)

    def _see_copy(self, name: str, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        if name == "aten::copy_":
            to, source = args[0].device, args[1]
            non_blocking = (args[2] if len(args) > 2 else kwargs.get("non_blocking")) or False
        else:
            source = args[0]
            to, non_blocking = kwargs.get("device") or source.device, kwargs.get("non_blocking") or False
        # Copies within one device, and copies of empty tensors, do not wait.
        to = torch.device(to)
        if to.type == source.device.type or not source.numel():
            return
        # A copy to the host is asynchronous only if its target is pinned.
        if to.type == "cpu" and name == "aten::copy_" and non_blocking and self._is_pinned(args[0]):
            self.copied_to_host_bytes += source.numel() * source.element_size()
        elif to.type == "cpu":
            self.add(name, "values are copied to the host")
        elif not non_blocking:
            self.add(name, "values are copied to the device, and the host waits for the copy")
        else:
            self._copies[current_place()] += 1
            self.copied_bytes += source.numel() * source.element_size()

    def _is_pinned(self, tensor: Tensor) -> bool:
        return self._pinned is not None and self._pinned.contains(tensor)

    def _see_index(self, name: str, args: Sequence[Any]) -> None:
        """Record a wait for a host index, which is copied to the device."""
        for index in tree_leaves(args[1]):
            if isinstance(index, Tensor) and index.device.type == "cpu" and index.ndim:
                self.add(name, "an index on the host is copied to the device, and the host waits for the copy")
