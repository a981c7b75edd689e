"""LocalKVCache: what one process keeps of a sequence that it continues."""

from __future__ import annotations

from torch import Tensor


class LocalLayerCache:
    """One layer's keys and values, in buffers that double when they are full, or its state."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens that the layer has seen."""
        self.state: Tensor | None = None
        """What a linear layer knows of them."""
        self._buffers: tuple[Tensor, Tensor] | None = None

    def append(self, k_BtKD: Tensor, v_BtKV: Tensor) -> tuple[Tensor, Tensor]:
        start = self.num_tokens
        stop = start + k_BtKD.shape[1]
        if self._buffers is None or self._buffers[0].shape[1] < stop:
            self._buffers = self._grown(k_BtKD, v_BtKV, stop)
        keys, values = self._buffers
        keys[:, start:stop], values[:, start:stop] = k_BtKD, v_BtKV
        self.num_tokens = stop
        return keys[:, :stop], values[:, :stop]

    def add_state(self, state_sBKDW: Tensor, num_tokens: int) -> None:
        # Not in place: the forward pass was given the old state, and a backward may still read it.
        if self.state is None:
            self.state = state_sBKDW
        else:
            self.state = self.state + state_sBKDW
        self.num_tokens += num_tokens

    def _grown(self, k_BtKD: Tensor, v_BtKV: Tensor, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Buffers for at least so many tokens, with those of today."""
        # Doubling copies each key about once, however many tokens come one by one.
        rows = max(2 * self.num_tokens, num_tokens, 64)
        B, _, K, D = k_BtKD.shape
        keys = k_BtKD.new_zeros(B, rows, K, D)
        values = v_BtKV.new_zeros(B, rows, K, v_BtKV.shape[3])
        if self._buffers is not None:
            keys[:, : self.num_tokens] = self._buffers[0][:, : self.num_tokens]
            values[:, : self.num_tokens] = self._buffers[1][:, : self.num_tokens]
        return keys, values


class LocalKVCache:
    """All keys and values in this process's memory, layer by layer."""

    def __init__(self) -> None:
        self._layers: dict[int, LocalLayerCache] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that every layer has seen: between two forward passes all have seen as many."""
        return self.layer(0).num_tokens

    def layer(self, number: int) -> LocalLayerCache:
        """The cache of one layer."""
        if number not in self._layers:
            self._layers[number] = LocalLayerCache()
        return self._layers[number]
