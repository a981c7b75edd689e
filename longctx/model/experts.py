"""The routed experts: dropless gated FFNs over tokens sorted by expert.

Axes: N tokens, k experts a token, R = N·k routed rows, M model width, F FFN width of one expert, E experts; I and O
are the input and output width of one grouped product.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.config import ModelConfig
from longctx.kernels.contract import accumulate_dtype
from longctx.kernels.matmul import multiplies_in_float32
from longctx.model.activations import gated, gated_backward
from longctx.model.dispatch import ExpertRun, LocalDispatcher


class Experts(nn.Module):
    """The experts of one layer, fused as Hugging Face keeps them in memory: gate rows first, then up rows.

    ``share`` are those whose weights are here: e of the layer's E, consecutive.
    """

    def __init__(self, config: ModelConfig, share: slice = slice(None)) -> None:
        super().__init__()
        e, M, F = len(range(config.num_experts)[share]), config.hidden_size, config.expert_ffn_size
        self.share, self.num_experts = share, config.num_experts
        self.activation = config.activation
        self.gate_up_proj = nn.Parameter(torch.empty(e, 2 * F, M))
        self.down_proj = nn.Parameter(torch.empty(e, M, F))
        self.gate_up_proj_bias: nn.Parameter | None
        self.down_proj_bias: nn.Parameter | None
        biased = config.expert_bias
        self.register_parameter("gate_up_proj_bias", nn.Parameter(torch.empty(e, 2 * F)) if biased else None)
        self.register_parameter("down_proj_bias", nn.Parameter(torch.empty(e, M)) if biased else None)

    def forward(self, x_NM: Tensor, gates_Nk: Tensor, experts_Nk: Tensor, run: ExpertRun | None = None) -> Tensor:
        """Σ over a token's k experts of gate · expert(x), [N, M] in float32 (float64 for float64).

        The gates are applied before the down projection, where backward needs no copy of the experts' outputs.
        """
        run = ExpertRun(LocalDispatcher()) if run is None else run
        assert run.dispatcher.share == self.share
        weights = (self.gate_up_proj, self.down_proj, self.gate_up_proj_bias, self.down_proj_bias)
        return _Experts.apply(x_NM, gates_Nk, experts_Nk, *weights, self.activation)


def is_expert_weight(name: str) -> bool:
    """Whether a parameter's first axis are experts, which ranks may share out."""
    return ".mlp.experts." in name


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


class _Experts(torch.autograd.Function):
    """Keeps the tokens and the projections before the activation; sorted tokens and the activation are formed again.

    Rows are copied and summed in a fixed order, where autograd would add them atomically. The parameters are saved and
    no view of them: ZeRO-3 frees a gathered weight by emptying the parameter.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_NM: Tensor,
        gates_Nk: Tensor,
        experts_Nk: Tensor,
        gate_up_EFM: Tensor,
        down_EMF: Tensor,
        gate_up_bias_EF: Tensor | None,
        down_bias_EM: Tensor | None,
        kind: str,
    ) -> Tensor:
        k = experts_Nk.shape[1]
        order_R, inverse_R, ends_E = sort_by_expert(experts_Nk, len(gate_up_EFM))
        expert_R, gates_R = (of.flatten().index_select(0, order_R) for of in (experts_Nk, gates_Nk))
        gate_up_RF = grouped_rows(_spread(x_NM, order_R, k), gate_up_EFM.mT, ends_E)
        if gate_up_bias_EF is not None:
            gate_up_RF += gate_up_bias_EF.index_select(0, expert_R)
        gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
        y_RM = grouped_rows(gated(kind, gate_RF, up_RF, gates_R), down_EMF.mT, ends_E)
        if down_bias_EM is not None:
            y_RM += (gates_R.unsqueeze(-1) * down_bias_EM.index_select(0, expert_R)).to(y_RM.dtype)
        ctx.save_for_backward(
            *(x_NM, gate_up_RF, gates_R, gate_up_EFM, down_EMF, gate_up_bias_EF, down_bias_EM),
            *(order_R, inverse_R, ends_E, expert_R),
        )
        ctx.k, ctx.kind = k, kind
        return _combine(y_RM, inverse_R, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_NM: Tensor):  # type: ignore[override]
        x_NM, gate_up_RF, gates_R, gate_up, down, gate_up_bias, down_bias, *rows = ctx.saved_tensors
        order_R, inverse_R, ends_E, expert_R = rows
        _, _, _, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
        dy_RM = _spread(dout_NM.to(x_NM.dtype), order_R, ctx.k)
        h_RF = gated(ctx.kind, gate_RF, up_RF, gates_R) if needs_down else None
        ddown = None if h_RF is None else grouped_outer(dy_RM, h_RF, ends_E)
        dh_RF = grouped_rows(dy_RM, down, ends_E)
        dgate_RF, dup_RF, dgates_R = gated_backward(ctx.kind, dh_RF, gate_RF, up_RF, gates_R)
        assert dgates_R is not None
        ddown_bias = None
        if down_bias is not None:
            wide_RM = dy_RM.to(gates_R.dtype)
            ddown_bias = _sum_by_expert(wide_RM * gates_R.unsqueeze(-1), ends_E, down_bias)
            dgates_R = dgates_R + (wide_RM * down_bias.index_select(0, expert_R)).sum(-1)
        dgate_up_RF = torch.cat((dgate_RF, dup_RF), dim=-1)
        dgate_up_bias = None if gate_up_bias is None else _sum_by_expert(dgate_up_RF, ends_E, gate_up_bias)
        x_RM = _spread(x_NM, order_R, ctx.k) if needs_gate_up else None
        dgate_up = None if x_RM is None else grouped_outer(dgate_up_RF, x_RM, ends_E)
        dx_NM = _combine(grouped_rows(dgate_up_RF, gate_up, ends_E), inverse_R, ctx.k).to(x_NM.dtype)
        dgates_Nk = dgates_R.index_select(0, inverse_R).view(-1, ctx.k)
        return dx_NM, dgates_Nk, None, dgate_up, ddown, dgate_up_bias, ddown_bias, None


def _sum_by_expert(rows_RO: Tensor, ends_E: Tensor, like_EO: Tensor) -> Tensor:
    """Neighbouring rows summed into their expert's own, in fixed order on every device."""
    offsets = torch.cat((ends_E.new_zeros(1), ends_E)).long()
    wide = rows_RO.to(accumulate_dtype(rows_RO.dtype))
    return torch.segment_reduce(wide, "sum", offsets=offsets, axis=0, initial=0).to(like_EO.dtype)


def _takes_grouped_mm(*operands: Tensor) -> bool:
    """Whether PyTorch's grouped product has these dtypes and widths: inner sizes of whole 16-byte words, no float64."""
    if multiplies_in_float32(operands[0]):
        return False
    return all(
        x.dtype in (torch.float32, torch.bfloat16) and x.shape[-1] * x.element_size() % 16 == 0 for x in operands
    )


def grouped_rows(x_RI: Tensor, weight_EIO: Tensor, ends_E: Tensor) -> Tensor:
    """Rows [R, I] times their expert's weight, [R, O]; expert e owns the rows from ``ends[e - 1]`` to ``ends[e]``."""
    if _takes_grouped_mm(x_RI, weight_EIO):
        return nn.functional.grouped_mm(x_RI, weight_EIO, offs=ends_E)
    out = x_RI.new_empty(x_RI.shape[0], weight_EIO.shape[-1])
    start = 0
    for stop, weight in zip(ends_E.tolist(), weight_EIO.unbind(), strict=True):
        out[start:stop] = _product(x_RI[start:stop], weight)
        start = stop
    return out


def grouped_outer(dy_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """Each expert's weight gradient, [E, O, I]; exact zeros for an expert without rows."""
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
