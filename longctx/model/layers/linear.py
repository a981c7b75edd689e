"""PyTorch's linear and embedding layers without their own initialisation, and a weight that is a layer by itself.

``longctx.model.layers.initialize`` gives every tensor values that depend only on its name and a seed; PyTorch's would
cost time and draw from the process's global generator."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.kernels.matmul import linear, linear_graph
from longctx.kernels.processor import Products


class Linear(nn.Linear):
    """``nn.Linear`` with weights left for ``Decoder.initialize`` or a state dict to fill."""

    products: Products = "native"
    """How a CPU multiplies bfloat16; ``set_products`` chooses it for a whole model."""

    def forward(self, input: Tensor, *, only_graph: bool = False) -> Tensor:
        """Return the product; with ``only_graph`` only its graph, and NaN (``linear_graph``)."""
        # A module finds its attributes slowly: the two would take a tenth of the time of a generated token's product.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        if only_graph:
            return linear_graph(input, weight, bias, products=self.products)
        return linear(input, weight, bias, products=self.products)

    def reset_parameters(self) -> None:
        """Do nothing."""


class Embedding(nn.Embedding):
    """``nn.Embedding`` with a table left for ``Decoder.initialize`` or a state dict to fill."""

    def reset_parameters(self) -> None:
        """Do nothing."""


def set_products(model: nn.Module, products: Products) -> None:
    """Let every linear layer of the model multiply in this way on a CPU, as ``model.to`` gives all one dtype."""
    for module in model.modules():
        if isinstance(module, Linear):
            module.products = products


class Weight(nn.Module):
    """Parameter that other modules use. Calling it returns a copy: ZeRO-3 takes the parameter back after the call."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape))

    def forward(self) -> Tensor:
        return self.weight.clone()
