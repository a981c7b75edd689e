"""PyTorch's linear and embedding layers without their own initialization, and a weight that is a layer by itself.

``longctx.model.layers.initialize`` derives every tensor from its name and a seed; PyTorch's initialization would cost
time and draw from the process's global generator.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from longctx.architecture.adapter import AdapterShape
from longctx.kernels.matmul import add_product, linear, linear_graph
from longctx.kernels.processor import MatmulMode
from longctx.kernels.quantized_weights import PackedLayout, dequantized, empty_parameter


class Linear(nn.Linear):
    """``nn.Linear`` with weights left for ``Decoder.initialize`` or a state dict to fill."""

    matmul_mode: MatmulMode = "native"
    """bfloat16 matmul on a CPU; ``set_matmul_mode`` selects it for an entire model."""
    layout: PackedLayout | None = None
    """Layout of a quantized weight; ``weight`` then holds its bytes."""

    def forward(self, input: Tensor, *, only_graph: bool = False) -> Tensor:
        """Multiply by the weight; with ``only_graph`` build only the graph and return NaN (``linear_graph``)."""
        # Module attribute access is slow: these two would take a tenth of the time for a generated token's matmul.
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        assert weight is not None
        if only_graph:
            out = linear_graph(input, weight, bias, matmul_mode=self.matmul_mode, layout=self.layout)
        else:
            out = linear(input, weight, bias, matmul_mode=self.matmul_mode, layout=self.layout)
        if "lora_A" in self._parameters:
            inner_Nr = linear(input, self.lora_A, matmul_mode=self.matmul_mode)
            return self.add_update(out, inner_Nr, only_graph=only_graph)
        return out

    def add_adapter(self, adapter: AdapterShape) -> None:
        """Add a low-rank update s·B·A to the weight (``AdapterShape``)."""
        self.lora_A = nn.Parameter(torch.empty(adapter.rank, self.in_features))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, adapter.rank))
        self.adapter_scale = adapter.scale

    def quantize_weight(self, kind: str) -> PackedLayout:
        """Store the frozen weight in 4 or 8 bits (``quantized_weights``), without values yet; return its layout."""
        self.layout = PackedLayout(kind, tuple(self.weight.shape))
        self.weight = empty_parameter(self.layout, self.weight.device)
        return self.layout

    def merged_weight(self, dtype: torch.dtype) -> Tensor:
        """Return the weight in its products' dtype, with the adapter's update, if there is one."""
        weight = dequantized(self.weight, self.layout, dtype)
        if "lora_A" not in self._parameters:
            return weight
        return torch.addmm(weight, self.lora_B, self.lora_A, alpha=self.adapter_scale)

    def add_update(self, out_NO: Tensor, inner_Nr: Tensor, *, only_graph: bool = False) -> Tensor:
        """Add s·B·inner, from A's products, to the output in its memory; ``only_graph`` as in ``add_product``."""
        # The scale multiplies r values per row instead of O.
        scaled_Nr = inner_Nr * self.adapter_scale
        return add_product(out_NO, scaled_Nr, self.lora_B, matmul_mode=self.matmul_mode, only_graph=only_graph)

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
