"""Fill a tensor with values from elsewhere, block by block; ranks that hold the same one share the reading."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from parallel.comm.communicator import Communicator
from parallel.comm.groups import ProcessGroup

BLOCK_VALUES = 1 << 24
"""Values that are on their way at a time: 64 MiB in float32, however large the tensor is."""

Read = Callable[[int, Tensor], None]
"""(start, out) fills the flat tensor ``out``, of any dtype and on any device, with float32 values from ``start``."""


def fill(out: Tensor, read: Read, *, shared_by: ProcessGroup | None = None) -> None:
    """Set the flat tensor ``out`` from ``read``.

    The ranks of ``shared_by`` fill equal tensors: each reads its part of them, once, and gets the others' parts from
    them. Collective among these.
    """
    if shared_by is not None and shared_by.size() > 1:
        _fill_together(out, read, shared_by)
        return
    for start in range(0, out.numel(), BLOCK_VALUES):
        read(start, out[start : start + BLOCK_VALUES])


def _fill_together(out: Tensor, read: Read, group: ProcessGroup) -> None:
    """``fill`` where each rank of a group reads one part, the last ones shorter or empty ones."""
    ranks, rank = group.size(), group.rank()
    part_numel = -(-out.numel() // ranks)
    block_numel = min(part_numel, -(-BLOCK_VALUES // ranks))
    # A gather wants as many values from every rank: those behind the end count for nothing.
    own = torch.zeros(block_numel, device=out.device)
    gathered = torch.empty(ranks, block_numel, device=out.device)
    parts = [out[number * part_numel : (number + 1) * part_numel] for number in range(ranks)]
    for start in range(0, part_numel, block_numel):
        count = len(parts[rank][start : start + block_numel])
        if count:
            read(rank * part_numel + start, own[:count])
        Communicator().all_gather(own, group, doing="sharing out the model's weights", out=gathered)
        for part, values in zip(parts, gathered, strict=True):
            block = part[start : start + block_numel]
            block.copy_(values[: len(block)])
