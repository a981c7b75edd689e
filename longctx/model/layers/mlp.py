"""The FFN of one width: of a dense layer, and of the expert that all tokens share.

Axes: N tokens (any leading shape), M model width, F FFN width.
"""

from __future__ import annotations

from torch import Tensor, nn

from longctx.architecture.rules import GATED
from longctx.config import ModelConfig
from longctx.model.layers.activations import PLAIN, gated_linear
from longctx.model.layers.linear import Linear


class GatedLinear(Linear):
    """The projection after a gated activation, which keeps the activation's two inputs and not its result."""

    def forward(  # type: ignore[override]
        self, gate_NF: Tensor, up_NF: Tensor, kind: str, *, only_graph: bool = False
    ) -> Tensor:
        return gated_linear(kind, gate_NF, up_NF, self.weight, self.bias, products=self.products, only_graph=only_graph)


class FeedForward(nn.Module):
    """down(activation(gate(x)) · up(x)), or down(activation(up(x))) where the activation has no gate."""

    def __init__(self, config: ModelConfig, ffn_size: int, *, bias: bool = False) -> None:
        super().__init__()
        M, self.activation = config.hidden_size, config.activation
        self.is_gated = config.activation in GATED
        # in this order, which state dicts and ZeRO's flat buffers follow
        if self.is_gated:
            self.gate_proj = Linear(M, ffn_size, bias=bias)
        self.up_proj = Linear(M, ffn_size, bias=bias)
        if self.is_gated:
            self.down_proj = GatedLinear(ffn_size, M, bias=bias)
        else:
            self.down_proj = Linear(ffn_size, M, bias=bias)

    def forward(self, x_NM: Tensor, *, only_graph: bool = False) -> Tensor:
        """The output; with ``only_graph`` NaN, for a second run of which backward reads no output."""
        if self.is_gated:
            gate_NF, up_NF = self.gate_proj(x_NM), self.up_proj(x_NM)
            return self.down_proj(gate_NF, up_NF, self.activation, only_graph=only_graph)
        return self.down_proj(PLAIN[self.activation](self.up_proj(x_NM)), only_graph=only_graph)
