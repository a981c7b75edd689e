"""``on_cpu``: the only check by which kernels distinguish a CPU from an accelerator."""

from __future__ import annotations

from torch import Tensor


def on_cpu(x: Tensor) -> bool:
    """Return whether ``x`` is in a CPU's memory.

    Code for a CPU checks this; all other code serves accelerators. Tests return False for tensors on the CPU, so that
    the branches of an accelerator run there (tests/as_on_a_gpu.py).
    """
    return x.device.type == "cpu"
