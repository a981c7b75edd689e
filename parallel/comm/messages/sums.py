"""A 64-bit sum over all bits of some tensors, which two ranks compare instead of the bytes.

**On a CPU** it is XXH3 of the bytes, 64 bits wide, at the speed of memory.

**On other devices** the bytes are 64-bit words in a grid of 1,024 columns. Rows and columns are summed (modulo 2^64),
each of these sums is mixed with its position by an invertible mixing of bits, and the results are added. All of it
stays on the device: the host does not wait.

* A flipped bit changes its row's sum and its column's by ±2^b, which no modulus makes 0. Two and three flipped bits
  change at least two of the sums: if they cancel in a row, they are in different columns.
* Any damage that leaves one row or column with another sum is found, but for a chance of 2^-64, as with XXH3.
* Damage that keeps the sums of all rows and columns is missed: four flips of one bit at the corners of a rectangle.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64

from longctx.kernels.devices import on_cpu
from longctx.tensor_bytes import as_bytes

_COLUMNS = 1024
"""Words of a row: rows and columns of a message of megabytes are then about equally many."""
_WORD = 8
_MASK_33, _MASK_32 = (1 << 33) - 1, (1 << 32) - 1
# The multipliers of MurmurHash3's 64-bit finalizer, as signed numbers.
_FIRST, _SECOND = 0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)
# Steps between the places of rows, and of columns: odd, so that no two places are equal.
_ROW_STEP, _COLUMN_STEP = 0x9E3779B97F4A7C15 - (1 << 64), 0xD1B54A32D192ED03 - (1 << 64)

Sum = int | Tensor
"""Unsigned, of tensors on a CPU; else int64 without an axis, on their device."""


def bit_sum(tensors: Sequence[Tensor]) -> Sum:
    """Return the sum over all bits of tensors, each contiguous in memory, in their order. No host sync."""
    if on_cpu(tensors[0]):
        digest = xxh3_64()
        for x in tensors:
            digest.update(as_bytes(x).numpy().data)
        return digest.intdigest()
    total = grid_sum(tensors[0])
    for x in tensors[1:]:
        # Mixed in between: swapped tensors have another sum.
        total = mixed(total) + grid_sum(x)
    return total


def on_host(sums: Sequence[Sum]) -> list[Sum]:
    """Return the sums on the host; all that are on another device are fetched at once.

    Fetched later one by one, from another thread, each would wait for all work queued on the device since.
    """
    on_device = [x for x in sums if isinstance(x, Tensor)]
    if not on_device:
        return list(sums)
    fetched = iter(torch.stack(on_device).cpu())
    return [next(fetched) if isinstance(x, Tensor) else x for x in sums]


def is_sum_of(total: Sum, x: Tensor) -> bool:
    """Return whether ``total`` is the ``bit_sum`` of a tensor that may have moved to another device since."""
    if isinstance(total, Tensor):
        return int(grid_sum(x)) == int(total)
    return bool(bit_sum([x]) == total)


def stacked(sums: Sequence[Sum], device: torch.device) -> Tensor:
    """Return sums as int64 on ``device``. Waits only if some are of CPU tensors and others on another device."""
    on_device = [x for x in sums if isinstance(x, Tensor)]
    if on_device and len(on_device) == len(sums):
        return torch.stack(on_device).to(device)
    numbers = np.array([int(x) % (1 << 64) for x in sums], dtype=np.uint64)
    return torch.from_numpy(numbers.view(np.int64)).to(device, non_blocking=True)


def grid_sum(x: Tensor) -> Tensor:
    """Return the sum of one contiguous tensor over rows and columns of its words: an int64 scalar on its device."""
    words, last = _words(x)
    full = words.numel() // _COLUMNS * _COLUMNS
    grid, rest = words[:full].view(-1, _COLUMNS), torch.cat((words[full:], last))
    # Modulo 2^64, which int64 is: the order of additions does not matter, and no two devices differ.
    rows = torch.cat((grid.sum(1), rest.sum(0, keepdim=True)))
    columns = grid.sum(0)
    columns[: rest.numel()] += rest
    return _placed(rows, _ROW_STEP).sum() + _placed(columns, _COLUMN_STEP).sum()


def mixed(values: Tensor) -> Tensor:
    """Return int64 values with mixed bits: a bijection in which one bit of input changes about half of all."""
    # Shifts of int64 extend the sign, so the bits that they shift in are masked; products are modulo 2^64.
    values = (values ^ ((values >> 31) & _MASK_33)) * _FIRST
    values = (values ^ ((values >> 32) & _MASK_32)) * _SECOND
    return values ^ ((values >> 31) & _MASK_33)


def _placed(sums: Tensor, step: int) -> Tensor:
    """Return each sum mixed with its position."""
    places = torch.arange(1, sums.numel() + 1, dtype=torch.int64, device=sums.device)
    return mixed(sums + places * step)


def _words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the 64-bit words of a tensor, and its remaining bytes as one word padded with zeros (empty if none)."""
    memory = as_bytes(x)
    whole = memory.numel() // _WORD * _WORD
    if memory.storage_offset() % _WORD:
        # A view as words must begin at a word boundary.
        memory = memory.clone()
    last = memory.new_zeros(0)
    if whole < memory.numel():
        last = memory.new_zeros(_WORD)
        last[: memory.numel() - whole] = memory[whole:]
    return memory[:whole].view(torch.int64), last.view(torch.int64)
