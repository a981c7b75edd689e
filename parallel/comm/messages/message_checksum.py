"""A 64-bit checksum over all bits in some tensors, which two ranks compare instead of the bytes.

**On a CPU** it is 64-bit XXH3 over the bytes, at memory speed.

**On other devices** the bytes form a grid of 64-bit words with 1,024 columns. Rows and columns are summed modulo 2^64,
each sum is mixed with its position by an invertible bit mixer, and the results are added. The computation stays on the
device; the host does not wait.

* A flipped bit changes its row's and its column's sum by ±2^b, which is never 0 modulo 2^64. Two or three flipped bits
  change at least two sums: if they cancel in a row, they are in different columns.
* Any corruption that changes at least one row or column sum is detected, except with probability 2^-64, as with XXH3.
* Corruption that keeps all row and column sums is missed: four flips of one bit at the corners of a rectangle.
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
"""Words per row; a message of a few megabytes then has about as many rows as columns."""
_WORD = 8
_MASK_33, _MASK_32 = (1 << 33) - 1, (1 << 32) - 1
# Multipliers from MurmurHash3's 64-bit finalizer, as signed integers.
_FIRST, _SECOND = 0xFF51AFD7ED558CCD - (1 << 64), 0xC4CEB9FE1A85EC53 - (1 << 64)
# Strides between row positions and between column positions: odd, so positions never coincide modulo 2^64.
_ROW_STEP, _COLUMN_STEP = 0x9E3779B97F4A7C15 - (1 << 64), 0xD1B54A32D192ED03 - (1 << 64)

Sum = int | Tensor
"""Unsigned int for CPU tensors; otherwise an int64 scalar tensor on their device."""


def bit_sum(tensors: Sequence[Tensor]) -> Sum:
    """Compute the checksum over all bits in contiguous tensors, in order. No host sync."""
    if on_cpu(tensors[0]):
        digest = xxh3_64()
        for x in tensors:
            digest.update(as_bytes(x).numpy().data)
        return digest.intdigest()
    total = grid_sum(tensors[0])
    for x in tensors[1:]:
        # Mix between tensors, so that swapping them changes the checksum.
        total = mixed(total) + grid_sum(x)
    return total


def on_host(sums: Sequence[Sum]) -> list[Sum]:
    """Copy the checksums to the host, with one transfer for all that are on another device.

    Fetched later one by one from another thread, each would wait for all work queued on the device since then.
    """
    on_device = [x for x in sums if isinstance(x, Tensor)]
    if not on_device:
        return list(sums)
    fetched = iter(torch.stack(on_device).cpu())
    return [next(fetched) if isinstance(x, Tensor) else x for x in sums]


def is_sum_of(total: Sum, x: Tensor) -> bool:
    """Return True if ``total`` is the ``bit_sum`` of a tensor that may have moved to another device since."""
    if isinstance(total, Tensor):
        return int(grid_sum(x)) == int(total)
    return bool(bit_sum([x]) == total)


def stacked(sums: Sequence[Sum], device: torch.device) -> Tensor:
    """Return checksums as int64 on ``device``. Synchronizes only if CPU and device checksums are mixed."""
    on_device = [x for x in sums if isinstance(x, Tensor)]
    if on_device and len(on_device) == len(sums):
        return torch.stack(on_device).to(device)
    numbers = np.array([int(x) % (1 << 64) for x in sums], dtype=np.uint64)
    return torch.from_numpy(numbers.view(np.int64)).to(device, non_blocking=True)


def grid_sum(x: Tensor) -> Tensor:
    """Compute the row-and-column checksum for one contiguous tensor: an int64 scalar on its device."""
    words, last = _words(x)
    full = words.numel() // _COLUMNS * _COLUMNS
    grid, rest = words[:full].view(-1, _COLUMNS), torch.cat((words[full:], last))
    # int64 arithmetic is modulo 2^64: the order of additions does not matter, and all devices agree.
    rows = torch.cat((grid.sum(1), rest.sum(0, keepdim=True)))
    columns = grid.sum(0)
    columns[: rest.numel()] += rest
    return _mix_with_position(rows, _ROW_STEP).sum() + _mix_with_position(columns, _COLUMN_STEP).sum()


def mixed(values: Tensor) -> Tensor:
    """Mix the bits of int64 values: a bijection in which one input bit flips about half the output bits."""
    # int64 shifts extend the sign, so mask the shifted-in bits; multiplication is modulo 2^64.
    values = (values ^ ((values >> 31) & _MASK_33)) * _FIRST
    values = (values ^ ((values >> 32) & _MASK_32)) * _SECOND
    return values ^ ((values >> 31) & _MASK_33)


def _mix_with_position(sums: Tensor, step: int) -> Tensor:
    """Mix each sum with its position."""
    positions = torch.arange(1, sums.numel() + 1, dtype=torch.int64, device=sums.device)
    return mixed(sums + positions * step)


def _words(x: Tensor) -> tuple[Tensor, Tensor]:
    """Split into 64-bit words and the remaining bytes, zero-padded to one word (empty without remainder)."""
    memory = as_bytes(x)
    whole = memory.numel() // _WORD * _WORD
    if memory.storage_offset() % _WORD:
        # A view as words must start at a word boundary.
        memory = memory.clone()
    last = memory.new_zeros(0)
    if whole < memory.numel():
        last = memory.new_zeros(_WORD)
        last[: memory.numel() - whole] = memory[whole:]
    return memory[:whole].view(torch.int64), last.view(torch.int64)
