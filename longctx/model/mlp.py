"""SwiGLU: the dense FFN, the shared expert, and the activation inside the routed experts.

Axes: N tokens (any leading shape), M model width, F FFN width.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.kernels.contract import accumulate_dtype
from longctx.model.layers import Linear


def swiglu(gate_NF: Tensor, up_NF: Tensor, scale_N: Tensor | None = None) -> Tensor:
    """silu(gate) · up, each row times ``scale`` where one is given; keeps its inputs for backward and nothing else."""
    return _SwiGLU.apply(gate_NF, up_NF, scale_N)


class _SwiGLU(torch.autograd.Function):
    """Autograd alone would keep silu(gate) and the unscaled product too: half as much again per token."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, scale: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate, up, scale)
        product = nn.functional.silu(gate).mul_(up)
        return product if scale is None else (product * scale.unsqueeze(-1)).to(product.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):  # type: ignore[override]
        gate, up, scale = ctx.saved_tensors
        activated, dscale = nn.functional.silu(gate), None
        if scale is not None:
            dscale = (activated * up).mul_(dout).sum(-1, dtype=accumulate_dtype(up.dtype)).to(scale.dtype)
            dout = (dout * scale.unsqueeze(-1)).to(dout.dtype)
        dup = activated.mul_(dout)
        dgate = torch.ops.aten.silu_backward(dout * up, gate)
        return dgate, dup, dscale


class SwiGLU(nn.Module):
    """down(silu(gate(x)) · up(x)), without biases."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x_NM: Tensor) -> Tensor:
        return self.down_proj(swiglu(self.gate_proj(x_NM), self.up_proj(x_NM)))
