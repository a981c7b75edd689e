"""Experts on a CPU: single-expert blocks of assignments, in buffers that every block reuses.

Axes: S received tokens, k experts per token, R assignments in expert order, n assignments in a block (and zero rows
after them for bfloat16 matmuls), M model width, F FFN width of one expert (gate and up together: 2F), e local experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.grouped import grouped_rows
from longctx.kernels.matmul import is_vector_product
from longctx.kernels.processor import MatmulMode
from longctx.model.experts.expert_blocks import ExpertBlocks, SavedChunks
from longctx.model.experts.experts_call import (
    DispatchedTokens,
    ExpertsCall,
    ExpertWeights,
    Needs,
    Update,
    saved_widths,
    whole,
)
from longctx.model.experts.gradient_sum import WeightGradients
from longctx.model.layers.mlp import gated, gated_backward


# Block by block: the buffers stay in the cache, and tensors for all assignments would need new pages in every call.
# Blocks run in expert order and add to their tokens one after another, so results repeat to the bit. Gates are applied
# before the down projection, so backward needs no expert outputs.
def forward_blocks(tokens: DispatchedTokens, weights: ExpertWeights, call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
    """Compute Σ gate · expert(x) over each token's local experts.

    Return the sums [S, M] in float32 (float64 for float64), and the tensors that ``call.run.recompute`` saves for
    backward.
    """
    x_SM = tokens.x_SM
    M, F = weights.down_eMF.shape[1:]
    if len(x_SM) == 1 and not saved_widths(call.run.recompute, weights, in_blocks=True):
        return _forward_token(tokens, weights, call), []
    blocks = ExpertBlocks(tokens, weights, call.run.matmul_mode)
    chunks = SavedChunks(blocks, tokens, weights, call)
    saved = chunks.allocate()
    out_SM = torch.zeros(x_SM.shape, dtype=accumulate_dtype(x_SM.dtype))
    for expert, block in blocks:
        # The first matmul: backward starts from its result.
        of_block = chunks.of(saved, block)
        x_nM = blocks.gather("x", x_SM, block)
        if len(of_block) == 2:
            of_block[1].copy_(blocks.own(x_nM, block))
        gate_up_nF = _gate_up(blocks, x_nM, weights, expert, block, of_block)

        # The gate enters before the second matmul, at F multiplications per token instead of M.
        gates_n1 = blocks.gates(block)
        inner_nF = blocks.buffer("inner", block, F)
        _gated_activation(call.activation, gate_up_nF, gates_n1, into=inner_nF)
        y_nM = blocks.buffer("y", block, M)
        blocks.project("down", inner_nF, weights.down_eMF, weights.down_update, expert, out=y_nM)
        if weights.down_bias_eM is not None:
            y_nM += gates_n1 * weights.down_bias_eM[expert]
        blocks.add_to_tokens(out_SM, y_nM, block)
    return out_SM, saved


def backward_blocks(
    dout_SM: Tensor,
    tokens: DispatchedTokens,
    weights: ExpertWeights,
    saved: list[Tensor],
    call: ExpertsCall,
    *,
    gradients: WeightGradients,
    needs: Needs,
) -> tuple[Tensor | None, Tensor]:
    """Compute the gradients for x [S, M], in float32 (float64 for float64), and for the gates [S, k].

    Weight gradients are added to ``gradients``. ``saved`` holds the tensors from ``forward_blocks``, freed on the way.
    """
    x_SM = tokens.x_SM
    M, F = weights.down_eMF.shape[1:]
    blocks = ExpertBlocks(tokens, weights, call.run.matmul_mode)
    chunks = SavedChunks(blocks, tokens, weights, call)
    dx_SM: Tensor | None = None
    if needs.x:
        dx_SM = torch.zeros(x_SM.shape, dtype=accumulate_dtype(x_SM.dtype))
    dgates_R = torch.empty(len(blocks.order_R), dtype=tokens.gates_Sk.dtype)
    for expert, block in blocks:
        # Free earlier blocks' saved tensors: weight gradients take their memory.
        chunks.free_before(saved, block)
        of_block = chunks.of(saved, block)
        gates_n1 = blocks.gates(block)
        gate_up_nF = _saved_gate_up(blocks, tokens, weights, expert, block, of_block)

        # Through the second matmul and the activation.
        dy_nM = blocks.gather("dy", dout_SM, block)
        dinner_nF = blocks.buffer("dinner", block, F)
        blocks.project_backward("down", dy_nM, weights.down_eMF, weights.down_update, expert, out=dinner_nF)
        inner_nF, dgate_up_nF = blocks.buffer("inner", block, F), blocks.buffer("dgate and dup", block, 2 * F)
        dgates_n = _gated_activation_backward(
            call.activation, dinner_nF, gate_up_nF, gates_n1, inner=inner_nF, into=dgate_up_nF
        )
        dgates_R[block] = blocks.own(dgates_n, block)
        if weights.down_bias_eM is not None:
            dgates_R[block] += blocks.own((dy_nM * weights.down_bias_eM[expert]).sum(-1), block)

        # Weight gradients, while their inputs are in the cache.
        if gradients.down is not None:
            gradients.down.add_outer(expert, dy_nM, inner_nF)
        of_update = gradients.down_a, gradients.down_b
        blocks.add_update_gradients("down", of_update, dy_nM, inner_nF, weights.down_update, expert)
        if gradients.down_bias is not None:
            gradients.down_bias.add_bias(expert, dy_nM * gates_n1)
        if gradients.gate_up_bias is not None:
            gradients.gate_up_bias.add_bias(expert, dgate_up_nF)
        if needs.reads_x:
            x_nM = _saved_x(blocks, x_SM, block, of_block)
            if gradients.gate_up is not None:
                gradients.gate_up.add_outer(expert, dgate_up_nF, x_nM)
            of_update = gradients.gate_up_a, gradients.gate_up_b
            blocks.add_update_gradients("gate_up", of_update, dgate_up_nF, x_nM, weights.gate_up_update, expert)
            # It may be a view of saved values, which the next block frees.
            del x_nM

        # Through the first matmul.
        if dx_SM is not None:
            dx_nM = blocks.buffer("dx", block, M)
            update = weights.gate_up_update
            blocks.project_backward("gate_up", dgate_up_nF, weights.gate_up_eFM, update, expert, out=dx_nM)
            blocks.add_to_tokens(dx_SM, dx_nM, block)
    # From expert order to token order; exactly 0 if a gate has no local expert.
    dgates_Sk = torch.zeros_like(tokens.gates_Sk, memory_format=torch.contiguous_format)
    dgates_Sk.view(-1)[blocks.order_R] = dgates_R
    return dx_SM, dgates_Sk


def _forward_token(tokens: DispatchedTokens, weights: ExpertWeights, call: ExpertsCall) -> Tensor:
    """Compute ``forward_blocks`` for one token, as in decoding; its experts' weights are read once, unconverted."""
    x_M, sum_dtype = tokens.x_SM[0], accumulate_dtype(tokens.x_SM.dtype)
    chosen = [(choice, expert) for choice, expert in enumerate(tokens.experts_Sk[0].tolist()) if expert >= 0]
    gates_R1 = tokens.gates_Sk[0].unsqueeze(-1)
    if len(chosen) < len(gates_R1):
        gates_R1 = gates_R1[[choice for choice, _ in chosen]]
    expert_R = [expert for _, expert in chosen]

    multiply_row = _row_times_matrix
    if is_vector_product(x_M, call.run.matmul_mode):
        multiply_row = torch.mv
    gate_up_RF = x_M.new_empty(len(chosen), weights.gate_up_eFM.shape[1])
    for row, expert in enumerate(expert_R):
        multiply_row(weights.gate_up_eFM[expert], x_M, out=gate_up_RF[row])
        _add_row_update(gate_up_RF[row], x_M, weights.gate_up_update, expert)
    if weights.gate_up_bias_eF is not None:
        gate_up_RF += weights.gate_up_bias_eF[expert_R]
    inner_RF = x_M.new_empty(len(chosen), weights.down_eMF.shape[2])
    _gated_activation(call.activation, gate_up_RF, gates_R1, into=inner_RF)

    y_RM = x_M.new_empty(len(chosen), len(x_M))
    for row, expert in enumerate(expert_R):
        multiply_row(weights.down_eMF[expert], inner_RF[row], out=y_RM[row])
        _add_row_update(y_RM[row], inner_RF[row], weights.down_update, expert)
    if weights.down_bias_eM is not None:
        y_RM += gates_R1 * weights.down_bias_eM[expert_R]
    return y_RM.sum(0, keepdim=True, dtype=sum_dtype)


def _add_row_update(out_O: Tensor, x_I: Tensor, update: Update | None, expert: int) -> None:
    if update is not None:
        out_O.addmv_(update.b_eOr[expert], torch.mv(update.a_erI[expert], x_I))


def _row_times_matrix(weight_OI: Tensor, x_I: Tensor, *, out: Tensor) -> None:
    torch.mm(x_I[None], weight_OI.T, out=out[None])


def forward_few(tokens: DispatchedTokens, weights: ExpertWeights, call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
    """Compute ``forward_blocks`` for a few tokens, as in decoding: one matmul for all experts, no saved tensors.

    Blocks with two or three tokens would have more calls than work.
    """
    if tokens.x_SM.shape[0] == 1:
        return _forward_token(tokens, weights, call), []
    k, sum_dtype = tokens.experts_Sk.shape[1], accumulate_dtype(tokens.x_SM.dtype)
    # NumPy sorts so few numbers faster than a PyTorch operator is called.
    ids = tokens.experts_Sk.flatten().numpy()
    order = ids.argsort(kind="stable")
    # Ids below 0 are no experts, and come first.
    num_missing = int(ids[order].searchsorted(0))
    if num_missing == len(ids):
        return torch.zeros(tokens.x_SM.shape, dtype=sum_dtype), []
    chosen = order[num_missing:]
    choice_R, token_R = torch.from_numpy(chosen), torch.from_numpy(chosen // k)
    counts = np.bincount(ids[chosen], minlength=weights.down_eMF.shape[0])
    ends_e = torch.from_numpy(counts.cumsum().astype(np.int32))  # grouped_mm takes int32 only
    gates_R1 = tokens.gates_Sk.flatten().index_select(0, choice_R).unsqueeze(-1)
    y_RM = _forward_sorted(tokens.x_SM.index_select(0, token_R), gates_R1, counts, ends_e, weights, call)
    if num_missing:
        # Added in expert order, as blocks are.
        out_SM = torch.zeros(tokens.x_SM.shape, dtype=sum_dtype)
        return out_SM.index_add_(0, token_R, y_RM.to(sum_dtype)), []
    # If every choice has a local expert: adding to rows takes ten times as long as reading them.
    row_of_choice = np.empty_like(order)
    row_of_choice[order] = np.arange(len(order))
    return y_RM.index_select(0, torch.from_numpy(row_of_choice)).view(-1, k, y_RM.shape[1]).sum(1, dtype=sum_dtype), []


def _forward_sorted(
    x_RM: Tensor, gates_R1: Tensor, counts: np.ndarray, ends_e: Tensor, weights: ExpertWeights, call: ExpertsCall
) -> Tensor:
    """Compute gate · expert(x) for assignments in expert order, [R, M]; ``counts`` has the number per expert."""
    matmul_mode = call.run.matmul_mode
    if call.layouts != (None, None):
        # Only the experts with tokens are dequantized.
        used = counts.nonzero()[0]
        weights, counts, ends_e = weights.select(used.tolist()), counts[used], ends_e[torch.from_numpy(used)]
    gate_up_eFM, down_eMF = whole(weights.gate_up_eFM), whole(weights.down_eMF)
    gate_up_RF = _project_sorted(x_RM, gate_up_eFM, weights.gate_up_update, ends_e, matmul_mode)
    if weights.gate_up_bias_eF is not None:
        gate_up_RF += weights.gate_up_bias_eF.repeat_interleave(torch.from_numpy(counts), dim=0)
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    inner_RF = gated(call.activation, gate_RF, up_RF).mul_(gates_R1)
    y_RM = _project_sorted(inner_RF, down_eMF, weights.down_update, ends_e, matmul_mode)
    if weights.down_bias_eM is not None:
        y_RM += gates_R1 * weights.down_bias_eM.repeat_interleave(torch.from_numpy(counts), dim=0)
    return y_RM


def _project_sorted(
    x_RI: Tensor, weight_eOI: Tensor, update: Update | None, ends_e: Tensor, matmul_mode: MatmulMode
) -> Tensor:
    """Multiply assignments in expert order by their expert's weight with its update, [R, O]."""
    out_RO = grouped_rows(x_RI, weight_eOI.mT, ends_e, matmul_mode=matmul_mode)
    if update is None:
        return out_RO
    inner_Rr = grouped_rows(x_RI, update.a_erI.mT, ends_e, matmul_mode=matmul_mode)
    return out_RO.add_(grouped_rows(inner_Rr, update.b_eOr.mT, ends_e, matmul_mode=matmul_mode))


def _gate_up(
    blocks: ExpertBlocks,
    x_nM: Tensor,
    weights: ExpertWeights,
    expert: int,
    block: slice,
    of_block: Sequence[Tensor] = (),
) -> Tensor:
    """Compute gate and up before the activation, [n, 2F]; also write them to the block's saved tensor."""
    saved_nF: Tensor | None = None
    if of_block:
        saved_nF = of_block[0]
    if saved_nF is not None and saved_nF.dtype == blocks.dtype and len(saved_nF) == len(x_nM):
        out_nF = saved_nF  # computed in place
    else:
        out_nF = blocks.buffer("gate and up", block, weights.gate_up_eFM.shape[1])
    blocks.project("gate_up", x_nM, weights.gate_up_eFM, weights.gate_up_update, expert, out=out_nF)
    if weights.gate_up_bias_eF is not None:
        out_nF += weights.gate_up_bias_eF[expert]
    if saved_nF is not None and saved_nF is not out_nF:
        saved_nF.copy_(blocks.own(out_nF, block))
    return out_nF


def _saved_gate_up(
    blocks: ExpertBlocks,
    tokens: DispatchedTokens,
    weights: ExpertWeights,
    expert: int,
    block: slice,
    of_block: Sequence[Tensor],
) -> Tensor:
    """Return gate and up as saved, or recomputed to the same bits."""
    width, dtype = weights.gate_up_eFM.shape[1], tokens.x_SM.dtype
    if of_block:
        return blocks.filled("gate and up", of_block[0], block)
    out_nF = _gate_up(blocks, blocks.gather("x", tokens.x_SM, block), weights, expert, block)
    if dtype == blocks.dtype:
        return out_nF
    # Rounded to x's dtype as saving does, so that recomputation changes no bit.
    rounded_nF = blocks.buffer("rounded", block, width, dtype).copy_(out_nF)
    return out_nF.copy_(rounded_nF)


def _saved_x(blocks: ExpertBlocks, x_SM: Tensor, block: slice, of_block: Sequence[Tensor]) -> Tensor:
    """Return the block's tokens as saved, or gather them again."""
    if len(of_block) < 2:
        return blocks.gather("x", x_SM, block)
    return blocks.filled("x", of_block[1], block)


def _gated_activation(activation: str, gate_up_nF: Tensor, gates_n1: Tensor, *, into: Tensor) -> None:
    """Write the activation times the router gate to ``into``."""
    gate_nF, up_nF = gate_up_nF.chunk(2, dim=-1)
    if activation == "swiglu":
        torch.ops.aten.silu.out(gate_nF, out=into).mul_(up_nF)
    else:
        into.copy_(gated(activation, gate_nF, up_nF))
    into.mul_(gates_n1)


def _gated_activation_backward(
    activation: str, dinner_nF: Tensor, gate_up_nF: Tensor, gates_n1: Tensor, *, inner: Tensor, into: Tensor
) -> Tensor:
    """Return the gates' gradients [n]; write gate's and up's gradients to ``into``.

    ``inner`` receives the result of ``_gated_activation``; ``dinner`` is overwritten.
    """
    if activation == "swiglu":
        return _swiglu_backward(dinner_nF, gate_up_nF, gates_n1, inner=inner, into=into)
    gate_nF, up_nF = gate_up_nF.chunk(2, dim=-1)
    dgate_nF, dup_nF = into.chunk(2, dim=-1)
    torch.mul(gated(activation, gate_nF, up_nF), gates_n1, out=inner)
    dgate, dup, dgates_n = gated_backward(activation, dinner_nF, gate_nF, up_nF, gates_n1.squeeze(-1))
    assert dgates_n is not None
    dgate_nF.copy_(dgate)
    dup_nF.copy_(dup)
    return dgates_n


def _swiglu_backward(dinner_nF: Tensor, gate_up_nF: Tensor, gates_n1: Tensor, *, inner: Tensor, into: Tensor) -> Tensor:
    """Compute ``_gated_activation_backward`` for silu(gate) · up without allocation: every result has its buffer."""
    gate_nF, up_nF = gate_up_nF.chunk(2, dim=-1)
    dgate_nF, dup_nF = into.chunk(2, dim=-1)
    # silu(gate), which is up's gradient except for the factors below.
    torch.ops.aten.silu.out(gate_nF, out=dup_nF)
    torch.mul(dup_nF, up_nF, out=inner)
    # The router gate's gradient uses values before the gate enters; F terms are summed in float32 at least.
    sum_dtype = accumulate_dtype(dinner_nF.dtype)
    if dinner_nF.dtype == sum_dtype:
        dgates_n = torch.linalg.vecdot(dinner_nF, inner)
    else:
        dgates_n = (dinner_nF * inner).sum(-1, dtype=sum_dtype)
    inner.mul_(gates_n1)
    dinner_nF.mul_(gates_n1)
    # dinner serves up first, then becomes silu(gate)'s gradient.
    dup_nF.mul_(dinner_nF)
    dinner_nF.mul_(up_nF)
    torch.ops.aten.silu_backward.grad_input(dinner_nF, gate_nF, grad_input=dgate_nF)
    return dgates_n
