"""PyTorch's linear and embedding layers without their own initialization, and a weight that is a layer by itself.

``longctx.model.layers.initialize`` derives every tensor from its name and a seed; PyTorch's initialization would cost
time and draw from the process's global generator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.kernels.matmul import linear, linear_graph
from longctx.kernels.processor import MatmulMode


class Linear(nn.Linear):
    """``nn.Linear`` with weights left for ``Decoder.initialize`` or a state dict to fill."""

    matmul_mode: MatmulMode = "native"
    """bfloat16 matmul on a CPU; ``set_matmul_mode`` selects it for an entire model."""

    def forward(self, input: Tensor, *, only_graph: bool = False) -> Tensor:
        """Multiply by the weight; with ``only_graph`` build only the graph and return NaN (``linear_graph``)."""
        # Module attribute access is slow: these two would take a tenth of the time for a generated token's matmul.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        if only_graph:
            return linear_graph(input, weight, bias, matmul_mode=self.matmul_mode)
        return linear(input, weight, bias, matmul_mode=self.matmul_mode)

    def reset_parameters(self) -> None:
        """Skip PyTorch's initialization."""


class Embedding(nn.Embedding):
    """``nn.Embedding`` with a table left for ``Decoder.initialize`` or a state dict to fill."""

    def reset_parameters(self) -> None:
        """Skip PyTorch's initialization."""


def set_matmul_mode(model: nn.Module, matmul_mode: MatmulMode) -> None:
    """Select the bfloat16 matmul on a CPU in every linear layer, as ``model.to`` sets a dtype."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.matmul_mode = matmul_mode


class Weight(nn.Module):
    """Parameter that other modules use. Calling it returns a copy: ZeRO-3 releases the parameter after the call."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        return self.weight.clone()
