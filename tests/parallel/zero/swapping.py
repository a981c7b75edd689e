"""Swapping of small tensors, for tests whose models are small."""

from __future__ import annotations

from deepspeed.runtime.swap_tensor import aio_config, optimizer_utils

from parallel.zero import swapping


def swap_everything() -> None:
    """Have tensors of any size swapped in this process; else those below 1 MiB stay in memory."""
    swapping.LEAST_BYTES = 1
    optimizer_utils.MIN_AIO_BYTES = 1
    aio_config.AIO_DEFAULT_DICT["block_size"] = 1
