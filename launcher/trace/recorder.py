"""``Recorder``: sees every operator of a step whose device tensors have no data.

What lives on the CPU (batches, schedules, slices) is computed as in a run; tensors on the GPU, and those in host memory
that is pinned to hold them for backward, carry shape, dtype and device alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    unset_fake_temporarily,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from launcher.trace.host_waits import HostWait, HostWaits
from launcher.trace.links import Links
from launcher.trace.live_bytes import LiveBytes


class StoppedAtWaitError(Exception):
    """The step asks for a value of the device, which a trace does not have."""

    def __init__(self, wait: HostWait) -> None:
        super().__init__(f"{wait.place}: {wait.operator}: {wait.why}")
        self.wait = wait


class Recorder(TorchDispatchMode):
    """Counts operators, live bytes, host waits and what is sent. Lies over a ``FakeTensorMode``."""

    def __init__(self, links: Links) -> None:
        super().__init__()
        self.live, self.links = LiveBytes(), links
        self.pinned = LiveBytes("cpu")
        """Host memory that the step moves tensors to; it has no data either."""
        self.waits = HostWaits(self.pinned)
        self.operators: Counter[str] = Counter()
        """Calls of each operator on the device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.links.see(func, args)
        if not _is_of_device(args, kwargs):
            # Schedules and slices are values that the host computes with: they must be real.
            with unset_fake_temporarily():
                return self.links.answered(func, args, kwargs, lambda: func(*args, **kwargs))
        self.waits.see(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            wait = self.waits.add(func.name(), "the host asks for a value, or for a size that depends on values")
            raise StoppedAtWaitError(wait) from error
        # Asking a tensor for its device launches nothing.
        if func is not torch.ops.prim.device.default:
            self.operators[func.name()] += 1
        self.live.see(func.name(), out)
        if kwargs.get("pin_memory"):
            self.pinned.see(func.name(), out)
        return out


def _is_of_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Whether a call reads or makes a tensor on the device, or pinned memory for one."""
    if kwargs.get("pin_memory"):
        return True
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return True
    return any(isinstance(x, FakeTensor) for x in tree_leaves((list(args), kwargs)) if isinstance(x, Tensor))
