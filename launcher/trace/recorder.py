"""``Recorder``: intercepts every operator in a step with device tensors that have no data.

CPU values (batches, schedules, slices) are computed as in a run. GPU tensors, and pinned host tensors that hold them
for backward, only have shape, dtype and device.
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

from launcher.plan.workspace import BackwardCall, backward_workspace
from launcher.trace.host_waits import HostWaits
from launcher.trace.link_traffic import Links
from launcher.trace.live_bytes import LiveBytes
from launcher.trace.rank_trace import HostWait
from longctx.kernels.traced_loops import times


class StoppedAtWaitError(Exception):
    """Raised if the step asks for a device value, which a trace does not have."""

    def __init__(self, wait: HostWait) -> None:
        super().__init__(f"{wait.place}: {wait.operator}: {wait.why}")
        self.wait = wait


class Recorder(TorchDispatchMode):
    """Dispatch mode that counts operators, live bytes, host waits and traffic. Used on top of a ``FakeTensorMode``."""

    def __init__(self, links: Links) -> None:
        super().__init__()
        self.live, self.links = LiveBytes(), links
        self.pinned = LiveBytes("cpu")
        """Pinned host memory to which the step moves tensors; it has no data either."""
        self.waits = HostWaits(self.pinned)
        self.operators: Counter[str] = Counter()
        """Calls per device operator."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # First, because collectives on CPU tensors are traffic too.
        self.links.see(func, args)
        if not _is_of_device(args, kwargs):
            # The host computes with schedules and slices, so they must be real.
            with unset_fake_temporarily():
                return self.links.run_collective(func, args, kwargs, lambda: func(*args, **kwargs))
        self.waits.see(func, args, kwargs)
        try:
            out = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            wait = self.waits.add(func.name(), "the host reads a value, or a size that depends on values")
            raise StoppedAtWaitError(wait) from error
        # Querying a tensor's device launches no kernel.
        if func is not torch.ops.prim.device.default:
            # A loop with identical steps is traced once for many.
            self.operators[func.name()] += times()
        self.live.see(func.name(), out, inside=_workspace(func.name(), args))
        if kwargs.get("pin_memory"):
            self.pinned.see(func.name(), out)
        return out


def _workspace(operator: str, args: Sequence[Any]) -> int:
    """Return the bytes that an operator allocates and frees internally, if the plan knows them."""
    if operator == "aten::_flash_attention_backward":
        q_nHD, cu_seqlens = args[1], args[6]
        shapes = [x_nHD.shape for x_nHD in args[1:4]]
        return backward_workspace("cuda_flash", _call(shapes, len(cu_seqlens) - 1, q_nHD.element_size()))
    if operator == "aten::_scaled_dot_product_cudnn_attention_backward":
        shapes = [(B * n, H, D) for B, H, n, D in (x_BHnD.shape for x_BHnD in args[1:4])]
        return backward_workspace("cudnn", _call(shapes, len(args[1]), args[1].element_size()))
    return 0


def _call(shapes: Sequence[Sequence[int]], num_sequences: int, itemsize: int) -> BackwardCall:
    """Build the call from the shapes of queries, keys and values: rows, heads, head size."""
    (num_queries, num_heads, head_dim), (num_keys, num_kv_heads, _), (_, _, value_dim) = shapes
    return BackwardCall(
        num_queries=num_queries,
        num_keys=num_keys,
        num_sequences=num_sequences,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        value_dim=value_dim,
        itemsize=itemsize,
    )


def _is_of_device(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    """Return True if a call reads or creates a device tensor, or pinned memory for one."""
    if kwargs.get("pin_memory"):
        return True
    device = kwargs.get("device")
    if device is not None and torch.device(device).type != "cpu":
        return True
    return any(isinstance(x, FakeTensor) for x in tree_leaves((list(args), kwargs)) if isinstance(x, Tensor))
