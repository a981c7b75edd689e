"""Slots: adjacent memory for several short sequences' keys, so that one call attends for all.

Axes: N slots, s rows per slot, K key/value heads, D query/key head size, V value head size, n tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

SLOT_TOKENS = 1024
"""Rows per slot. Longer sequences have their own buffers: their attention takes longer than the call overhead."""
_STEP = 64
"""Rows zeroed at a time."""


class CacheSlot(NamedTuple):
    """One sequence's rows in a pool."""

    pool: SlotPool
    number: int


class SlotPool:
    """Slots for sequences that are generated together, in every layer."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots))
        self._layers: dict[int, SlotLayer] = {}

    def take(self) -> CacheSlot | None:
        """Reserve the first free slot, if any."""
        if not self._free:
            return None
        number = min(self._free)
        self._free.remove(number)
        return CacheSlot(self, number)

    def release(self, slot: CacheSlot) -> None:
        """Release the slot for another sequence."""
        assert slot.number not in self._free, f"slot {slot.number} is already free"
        # Rows stay as they are: the next sequence overwrites them, and masks hide the rest.
        self._free.append(slot.number)

    def layer(self, number: int) -> SlotLayer:
        """Return one layer's rows; create them on first use."""
        if number not in self._layers:
            self._layers[number] = SlotLayer(self.num_slots)
        return self._layers[number]


class SlotLayer:
    """One layer's rows for all slots, [N, s, K, D] and [N, s, K, V]."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._num_ready = 0
        self._keys: Tensor | None = None
        self._values: Tensor | None = None

    def make_ready(self, stop: int, keys: Tensor, values: Tensor | None) -> None:
        """Zero all rows before ``stop`` in every slot; keys [… K, D] and values [… K, V] give widths and dtype."""
        if self._keys is None:
            # On a CPU, pages take memory only when rows are zeroed below.
            self._keys = keys.new_empty(self._num_slots, SLOT_TOKENS, keys.shape[-2], keys.shape[-1])
            if values is not None:
                self._values = values.new_empty(self._num_slots, SLOT_TOKENS, values.shape[-2], values.shape[-1])
        if stop <= self._num_ready:
            return
        # A masked key is still multiplied by weight 0, and 0 · NaN is NaN: every row in use must be finite.
        ready = slice(self._num_ready, min(-(-stop // _STEP) * _STEP, SLOT_TOKENS))
        self._keys[:, ready] = 0
        if self._values is not None:
            self._values[:, ready] = 0
        self._num_ready = ready.stop

    def of_slot(self, number: int) -> tuple[Tensor, Tensor | None]:
        """Return one slot's rows, [1, s, K, D] and [1, s, K, V]."""
        assert self._keys is not None, "no rows are ready"
        own = slice(number, number + 1)
        values = None
        if self._values is not None:
            values = self._values[own]
        return self._keys[own], values

    def put(self, slots_n: Tensor, rows_n: Tensor, k_nKD: Tensor, v_nKV: Tensor | None, *, stop: int) -> None:
        """Store one row in each of these slots, all before ``stop``."""
        self.make_ready(stop, k_nKD, v_nKV)
        assert self._keys is not None
        self._keys.index_put_((slots_n, rows_n), k_nKD)
        if self._values is not None and v_nKV is not None:
            self._values.index_put_((slots_n, rows_n), v_nKV)

    def first_rows(self, slots: slice | Tensor, stop: int) -> tuple[Tensor, Tensor | None]:
        """Return the rows before ``stop`` in these slots."""
        assert self._keys is not None, "no rows are ready"
        values = None
        if self._values is not None:
            values = _take(self._values, slots, stop)
        return _take(self._keys, slots, stop), values


def _take(x_NsKX: Tensor, slots: slice | Tensor, stop: int) -> Tensor:
    if isinstance(slots, slice):
        return x_NsKX[slots, :stop]
    return x_NsKX[:, :stop].index_select(0, slots)


def as_range(numbers: list[int]) -> slice | Tensor:
    """Return slots in this order: a slice if they are consecutive, otherwise an index."""
    if numbers == list(range(numbers[0], numbers[0] + len(numbers))):
        return slice(numbers[0], numbers[0] + len(numbers))
    return torch.tensor(numbers)
