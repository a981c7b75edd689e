"""The routed experts: dropless gated FFNs over tokens sorted by expert.

Axes: N tokens, k experts a token, R = N·k routed rows, M model width, F FFN width of one expert, E experts; I and O
are the input and output width of one grouped product.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.config import ModelConfig
from longctx.kernels.contract import accumulate_dtype
from longctx.kernels.matmul import multiplies_in_float32
from longctx.model.activations import gated


class Experts(nn.Module):
    """All experts of one layer, fused as Hugging Face keeps them in memory: gate rows first, then up rows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E, M, F = config.num_experts, config.hidden_size, config.expert_ffn_size
        self.activation = config.activation
        self.gate_up_proj = nn.Parameter(torch.empty(E, 2 * F, M))
        self.down_proj = nn.Parameter(torch.empty(E, M, F))
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        biased = config.expert_bias
        self.register_parameter("gate_up_proj_bias", nn.Parameter(torch.empty(E, 2 * F)) if biased else None)
        self.register_parameter("down_proj_bias", nn.Parameter(torch.empty(E, M)) if biased else None)

    def forward(self, x_NM: Tensor, gates_Nk: Tensor, experts_Nk: Tensor) -> Tensor:
        """Σ over a token's k experts of gate · expert(x), [N, M] in float32 (float64 for float64).

        The gates are applied before the down projection, where backward needs no copy of the experts' outputs.
        """
        k = experts_Nk.shape[1]
        order_R, inverse_R, ends_E = sort_by_expert(experts_Nk, self.gate_up_proj.shape[0])
        x_RM = _Spread.apply(x_NM, order_R, inverse_R, k)
        gates_R = gates_Nk.flatten().index_select(0, order_R)
        gate_up_RF = grouped_linear(x_RM, self.gate_up_proj, ends_E)
        if self.gate_up_proj_bias is None or self.down_proj_bias is None:
            gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
            h_RF = gated(self.activation, gate_RF, up_RF, gates_R)
            return _Combine.apply(grouped_linear(h_RF, self.down_proj, ends_E), order_R, inverse_R, k)
        expert_R = experts_Nk.flatten().index_select(0, order_R)
        gate_up_RF = gate_up_RF + self.gate_up_proj_bias.index_select(0, expert_R)
        gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
        h_RF = gated(self.activation, gate_RF, up_RF, gates_R)
        shift_RM = gates_R.to(h_RF.dtype).unsqueeze(-1) * self.down_proj_bias.index_select(0, expert_R)
        return _Combine.apply(grouped_linear(h_RF, self.down_proj, ends_E) + shift_RM, order_R, inverse_R, k)


def sort_by_expert(experts_Nk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Routed rows in expert order, stable: index into the flattened [N, k], its inverse, each expert's end row."""
    chosen_R = experts_Nk.flatten()
    order_R = chosen_R.argsort(stable=True)
    inverse_R = torch.empty_like(order_R)
    inverse_R[order_R] = torch.arange(len(order_R), device=order_R.device)
    counts_E = chosen_R.new_zeros(num_experts).scatter_add_(0, chosen_R, torch.ones_like(chosen_R))
    return order_R, inverse_R, counts_E.cumsum(0, dtype=torch.int32)  # grouped_mm takes int32 only


def _spread(x_NM: Tensor, order_R: Tensor, k: int) -> Tensor:
    return x_NM.index_select(0, order_R // k)


def _combine(y_RM: Tensor, inverse_R: Tensor, k: int) -> Tensor:
    """The sum of each token's k rows, always in the order of its choices, in float32."""
    rows = y_RM.index_select(0, inverse_R).unflatten(0, (-1, k))
    return rows.sum(1, dtype=accumulate_dtype(y_RM.dtype))


class _Spread(torch.autograd.Function):
    """Token rows copied to their experts' rows. Autograd's own gradient would add rows atomically, in any order."""

    @staticmethod
    def forward(ctx, x_NM: Tensor, order_R: Tensor, inverse_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse_R)
        ctx.k = k
        return _spread(x_NM, order_R, k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dx_RM: Tensor):  # type: ignore[override]
        (inverse_R,) = ctx.saved_tensors
        return _combine(dx_RM, inverse_R, ctx.k).to(dx_RM.dtype), None, None, None


class _Combine(torch.autograd.Function):
    """The transpose of ``_Spread``."""

    @staticmethod
    def forward(ctx, y_RM: Tensor, order_R: Tensor, inverse_R: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order_R)
        ctx.k, ctx.dtype = k, y_RM.dtype
        return _combine(y_RM, inverse_R, k)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_NM: Tensor):  # type: ignore[override]
        (order_R,) = ctx.saved_tensors
        return _spread(dy_NM.to(ctx.dtype), order_R, ctx.k), None, None, None


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Rows [R, I] times their expert's weight, [R, O]; expert e owns the rows from ``ends[e - 1]`` to ``ends[e]``.

    An expert without rows gets a gradient of exact zeros.
    """
    return _GroupedLinear.apply(x_RI, weight_EOI, ends_E)


class _GroupedLinear(torch.autograd.Function):
    """Saves the parameter itself and no view of it: ZeRO-3 frees a gathered weight by emptying the parameter."""

    @staticmethod
    def forward(ctx, x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, ends_E)
        return _grouped_rows(x_RI, weight_EOI.mT, ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy_RO: Tensor):  # type: ignore[override]
        x_RI, weight_EOI, ends_E = ctx.saved_tensors
        dy_RO = dy_RO.contiguous()  # grouped_mm refuses the stride-0 gradient of a sum
        dx = _grouped_rows(dy_RO, weight_EOI, ends_E) if ctx.needs_input_grad[0] else None
        dweight = _grouped_outer(dy_RO, x_RI, ends_E) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


def _takes_grouped_mm(*operands: Tensor) -> bool:
    """Whether PyTorch's grouped product has these dtypes and widths: inner sizes of whole 16-byte words, no float64."""
    if multiplies_in_float32(operands[0]):
        return False
    return all(
        x.dtype in (torch.float32, torch.bfloat16) and x.shape[-1] * x.element_size() % 16 == 0 for x in operands
    )


def _grouped_rows(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    if _takes_grouped_mm(x_RI, weight_EIO):
        return nn.functional.grouped_mm(x_RI, weight_EIO, offs=ends_E)
    out = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[-1])
    start = 0
    for stop, weight in zip(ends_E.tolist(), weight_EIO.unbind(), strict=True):
        out[start:stop] = _product(x_RI[start:stop], weight)
        start = stop
    return out


def _grouped_outer(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's weight gradient, [E, O, I]."""
    if _takes_grouped_mm(dy_RO, x_RI):
        grad = nn.functional.grouped_mm(dy_RO.T, x_RI, offs=ends_E)
        if grad.is_cuda:  # CUDA kernels have left groups without rows unwritten
            empty_E = ends_E == torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
            grad.masked_fill_(empty_E[:, None, None], 0)
        return grad
    starts = [0, *ends_E.tolist()]
    return torch.stack([_product(dy_RO[a:b].T, x_RI[a:b]) for a, b in pairwise(starts)])


def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a.float() @ b.float()).to(a.dtype) if multiplies_in_float32(a) else a @ b
