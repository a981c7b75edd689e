"""The initial weights of a whole model, read as a checkpoint is: by tensor and range."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from longctx.checkpoint_format import is_buffer
from longctx.config import ModelConfig
from longctx.model.layers.initialize import InitialTensor


class InitialWeights:
    """Draws the range that it is asked for, and nothing else."""

    def __init__(self, config: ModelConfig, shapes: Mapping[str, torch.Size], *, seed: int, dtype: torch.dtype) -> None:
        """``shapes`` are those of the whole model's parameters. A master starts as a weight of ``dtype`` is."""
        self._config, self._shapes, self._seed, self._dtype = config, shapes, seed, dtype
        self._name, self._tensor = "", InitialTensor("", 0, config, seed)

    def read(self, name: str, role: str, start: int, out: Tensor) -> None:
        """Fill ``out`` with values of the flattened tensor from ``start``; buffers start as 0."""
        if is_buffer(name):
            out.zero_()
            return
        # One tensor after the other: the block that a range ends in is kept for the next one.
        if name != self._name:
            self._tensor = InitialTensor(name, self._shapes[name].numel(), self._config, self._seed)
            self._name = name
        out.copy_(self._tensor.read(start, len(out)).to(self._dtype))
