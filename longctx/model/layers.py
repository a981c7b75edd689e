"""PyTorch's linear and embedding layers without their own initialisation.

``longctx.model.initialize`` gives every tensor values that depend on its name and a seed alone; PyTorch's would cost
time and draw from the process's global generator.
"""

from __future__ import annotations

from torch import nn


class Linear(nn.Linear):
    """``nn.Linear`` whose weights are left for ``Decoder.initialize`` or a state dict to fill."""

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(nn.Embedding):
    """``nn.Embedding`` whose table is left for ``Decoder.initialize`` or a state dict to fill."""

    def reset_parameters(self) -> None:
        """Do nothing."""
