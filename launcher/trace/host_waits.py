"""``HostWaits``: where a step makes the host wait for the device, named by file and line.

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

from launcher.trace.figures import HostWait
from launcher.trace.live_bytes import LiveBytes, current_place

_COPIES = ("aten::_to_copy", "aten::copy_")
_INDEXED = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")


class HostWaits:
    """Collects waits, and copies from the host that are none."""

    def __init__(self, pinned: LiveBytes | None = None) -> None:
        """``pinned`` knows the host memory that a copy needs no wait to reach."""
        self._pinned = pinned
        self._waits: Counter[tuple[str, str, str]] = Counter()
        self._copies: Counter[str] = Counter()
        self.copied_bytes = 0
        """Bytes that went to the device without a wait."""
        self.copied_to_host_bytes = 0
        """Bytes that went to pinned memory without one."""

    @property
    def found(self) -> list[HostWait]:
        """Every line with a wait, in the order in which they were met."""
        return [HostWait(place, operator, why, times) for (place, operator, why), times in self._waits.items()]

    @property
    def copies(self) -> int:
        """Copies to the device without a wait."""
        return self._copies.total()

    def add(self, operator: str, why: str) -> HostWait:
        """Note a wait at the line that is running; returns it."""
        place = current_place() or "PyTorch's own backward"
        self._waits[place, operator, why] += 1
        return HostWait(place, operator, why)

    def see(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Look at a call before it happens."""
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
        # Within one device nobody waits, and nothing is copied of an empty tensor.
        to = torch.device(to)
        if to.type == source.device.type or not source.numel():
            return
        if to.type == "cpu" and name == "aten::copy_" and non_blocking and self._is_pinned(args[0]):
            self.copied_to_host_bytes += source.numel() * source.element_size()
        elif to.type == "cpu":
            self.add(name, "values are copied to the host")
        elif not non_blocking:
            self.add(name, "values are copied to the device, and the host waits until they are there")
        else:
            self._copies[current_place()] += 1
            self.copied_bytes += source.numel() * source.element_size()

    def _is_pinned(self, tensor: Tensor) -> bool:
        return self._pinned is not None and self._pinned.holds(tensor)

    def _see_index(self, name: str, args: Sequence[Any]) -> None:
        """An index on the host is copied to the device with a wait."""
        for index in tree_leaves(args[1]):
            if isinstance(index, Tensor) and index.device.type == "cpu" and index.ndim:
                self.add(name, "an index on the host is copied to the device, and the host waits until it is there")
