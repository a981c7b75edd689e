"""LocalKVCache."""

from __future__ import annotations

from torch import Tensor


class LocalKVCache:
    """All keys and values in this process's memory, in buffers that double when they are full."""

    def __init__(self) -> None:
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._states: dict[int, Tensor] = {}

    def append(self, layer: int, k_BtKD: Tensor, v_BtKV: Tensor) -> tuple[Tensor, Tensor]:
        start = self._lengths.get(layer, 0)
        stop = start + k_BtKD.shape[1]
        if layer not in self._buffers or self._buffers[layer][0].shape[1] < stop:
            self._grow(layer, (k_BtKD, v_BtKV), start, stop)
        keys, values = self._buffers[layer]
        keys[:, start:stop], values[:, start:stop] = k_BtKD, v_BtKV
        self._lengths[layer] = stop
        return keys[:, :stop], values[:, :stop]

    def add_state(self, layer: int, state_sBKDW: Tensor) -> None:
        known = self._states.get(layer)
        self._states[layer] = state_sBKDW if known is None else known + state_sBKDW

    def state(self, layer: int) -> Tensor | None:
        return self._states.get(layer)

    def _grow(self, layer: int, like: tuple[Tensor, Tensor], start: int, stop: int) -> None:
        rows = max(2 * start, stop, 64)
        keys, values = (x.new_zeros(x.shape[0], rows, *x.shape[2:]) for x in like)
        if layer in self._buffers:
            for new, old in zip((keys, values), self._buffers[layer], strict=True):
                new[:, :start] = old[:, :start]
        self._buffers[layer] = (keys, values)
