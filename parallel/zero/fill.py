"""Fill a tensor with values from elsewhere, block by block; ranks that hold the same one share the reading."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from parallel.runtime.communicate import named_collective

BLOCK_VALUES = 1 << 24
"""Values that are on their way at a time: 64 MiB in float32, however large the tensor is."""

Read = Callable[[int, int], Tensor]
"""(start, count) -> flat float32 values on the CPU."""


def fill(out: Tensor, read: Read, *, shared_by: dist.ProcessGroup | None = None) -> None:
    """Set the flat tensor ``out`` from ``read``.

    The ranks of ``shared_by`` fill equal tensors: each reads its part of every block, once, and gets the others' parts
    from them. Collective among these.
    """
    for start in range(0, out.numel(), BLOCK_VALUES):
        block = out[start : start + BLOCK_VALUES]
        if shared_by is None or dist.get_world_size(shared_by) == 1:
            block.copy_(read(start, block.numel()))
        else:
            block.copy_(_read_together(block, start, read, shared_by))


def _read_together(block: Tensor, start: int, read: Read, group: dist.ProcessGroup) -> Tensor:
    """The values of a block, of which this rank reads one part; on the block's device."""
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    # Equal parts, of which the last ones may be shorter or empty: a gather wants as many values from every rank.
    part_numel = -(-block.numel() // ranks)
    first = min(rank * part_numel, block.numel())
    count = min(part_numel, block.numel() - first)
    own = torch.zeros(part_numel, device=block.device)
    if count:
        own[:count].copy_(read(start + first, count))
    gathered = torch.empty(ranks * part_numel, device=block.device)
    named_collective(lambda: dist.all_gather_into_tensor(gathered, own, group=group), "sharing out initial values")
    return gathered[: block.numel()]
