"""``on_cpu``: the only check that distinguishes a CPU from an accelerator in kernels."""

from __future__ import annotations

from torch import Tensor


def on_cpu(x: Tensor) -> bool:
    """Return whether ``x`` is in CPU memory.

    CPU-specific code checks this; all other code serves accelerators. Tests patch it to return False for CPU tensors,
    to run accelerator branches there (tests/as_on_a_gpu.py).
    """
    return x.device.type == "cpu"
