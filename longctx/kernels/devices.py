"""``on_cpu``: the one question by which kernels differ between a CPU and an accelerator."""

from __future__ import annotations

from torch import Tensor


def on_cpu(x: Tensor) -> bool:
    """True if ``x`` is in a CPU's memory.

    Code for a CPU asks this; what is left serves accelerators. Tests answer no for tensors on the CPU, so that the
    branches of an accelerator compute there (tests/as_on_a_gpu.py).
    """
    return x.device.type == "cpu"
