"""Experts on an accelerator: all assignments at once, in grouped matmuls.

Axes: S received tokens, k experts per token, R assignments in expert order, M model width, F FFN width of one expert
(gate and up together: 2F), e local experts; I and O are one matmul's widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.grouped import grouped_outer, grouped_rows, sort_by_expert, sum_by_expert
from longctx.kernels.processor import MatmulMode
from longctx.model.experts.experts_call import (
    DispatchedTokens,
    ExpertsCall,
    ExpertWeights,
    Needs,
    QuantizedExperts,
    Update,
    saved_widths,
    whole,
)
from longctx.model.experts.gradient_sum import GradientSum, WeightGradients
from longctx.model.layers.mlp import gated, gated_backward


def forward_grouped(tokens: DispatchedTokens, weights: ExpertWeights, call: ExpertsCall) -> tuple[Tensor, list[Tensor]]:
    """Compute Σ gate · expert(x) over each token's local experts.

    Return the sums [S, M] in float32 (float64 for float64), and the tensors that ``call.run.recompute`` saves for
    backward.
    """
    permuted = _Permuted(tokens, weights, call.run.matmul_mode)
    x_RM, gates_R = permuted.gather(tokens.x_SM), permuted.gather_gates(tokens.gates_Sk)
    gate_up_RF = _gate_up(permuted, x_RM, weights)
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)
    # The gate enters before the second matmul, at F multiplications per token instead of M.
    inner_RF = gated(call.activation, gate_RF, up_RF, gates_R)
    y_RM = permuted.project(inner_RF, weights.down_eMF, weights.down_update)
    if weights.down_bias_eM is not None:
        y_RM += (gates_R.unsqueeze(-1) * permuted.gather_bias(weights.down_bias_eM)).to(y_RM.dtype)
    saved = [gate_up_RF, inner_RF, x_RM]
    return permuted.sum_tokens(y_RM), saved[: len(saved_widths(call.run.recompute, weights, in_blocks=False))]


def backward_grouped(
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

    Weight gradients are added to ``gradients``. ``saved`` holds the tensors from ``forward_grouped``, which are freed.
    """
    permuted = _Permuted(tokens, weights, call.run.matmul_mode)
    gates_R, dy_RM = permuted.gather_gates(tokens.gates_Sk), permuted.gather(dout_SM.to(tokens.x_SM.dtype))
    gate_up_RF, inner_RF, x_RM = _saved_or_recomputed(permuted, tokens, weights, saved, needs)
    gate_RF, up_RF = gate_up_RF.chunk(2, dim=-1)

    # Through the second matmul and the activation.
    if needs.reads_inner:
        if inner_RF is None:
            inner_RF = gated(call.activation, gate_RF, up_RF, gates_R)
        if gradients.down is not None:
            gradients.down.add(permuted.outer(dy_RM, inner_RF))
        permuted.add_update_gradients(gradients.down_a, gradients.down_b, dy_RM, inner_RF, weights.down_update)
    del inner_RF
    dinner_RF = permuted.project_backward(dy_RM, weights.down_eMF, weights.down_update)
    dgate_RF, dup_RF, dgates_R = gated_backward(call.activation, dinner_RF, gate_RF, up_RF, gates_R)
    del dinner_RF
    assert dgates_R is not None
    if weights.down_bias_eM is not None:
        upcast_dy_RM = dy_RM.to(gates_R.dtype)
        dgates_R = dgates_R + (upcast_dy_RM * permuted.gather_bias(weights.down_bias_eM)).sum(-1)
        if gradients.down_bias is not None:
            gradients.down_bias.add(permuted.sum_by_expert(upcast_dy_RM * gates_R.unsqueeze(-1)))
    dgate_up_RF = torch.cat((dgate_RF, dup_RF), dim=-1)

    # The largest tensors of all: free them before the last gradients are computed.
    saved.clear()
    del gate_up_RF, gate_RF, up_RF, dgate_RF, dup_RF, dy_RM

    # Through the first matmul.
    if gradients.gate_up_bias is not None:
        gradients.gate_up_bias.add(permuted.sum_by_expert(dgate_up_RF))
    if needs.reads_x:
        assert x_RM is not None
        if gradients.gate_up is not None:
            gradients.gate_up.add(permuted.outer(dgate_up_RF, x_RM))
        update = weights.gate_up_update
        permuted.add_update_gradients(gradients.gate_up_a, gradients.gate_up_b, dgate_up_RF, x_RM, update)
    del x_RM
    dx_SM = None
    if needs.x:
        dx_RM = permuted.project_backward(dgate_up_RF, weights.gate_up_eFM, weights.gate_up_update)
        dx_SM = permuted.sum_tokens(dx_RM)
    return dx_SM, permuted.restore_gates(dgates_R)


def _gate_up(permuted: _Permuted, x_RM: Tensor, weights: ExpertWeights) -> Tensor:
    """Compute gate and up before the activation, [R, 2F]."""
    gate_up_RF = permuted.project(x_RM, weights.gate_up_eFM, weights.gate_up_update)
    if weights.gate_up_bias_eF is not None:
        gate_up_RF += permuted.gather_bias(weights.gate_up_bias_eF)
    return gate_up_RF


def _saved_or_recomputed(
    permuted: _Permuted, tokens: DispatchedTokens, weights: ExpertWeights, saved: list[Tensor], needs: Needs
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return gate and up; the activation if it was saved; x if a gradient needs it."""
    if len(saved) == 3:
        return saved[0], saved[1], saved[2]
    if saved:
        if needs.reads_x:
            return saved[0], None, permuted.gather(tokens.x_SM)
        return saved[0], None, None
    # Without saved tensors, repeat the first matmul.
    x_RM = permuted.gather(tokens.x_SM)
    return _gate_up(permuted, x_RM, weights), None, x_RM


class _Permuted:
    """A tile's assignments in expert order."""

    def __init__(self, tokens: DispatchedTokens, weights: ExpertWeights, matmul_mode: MatmulMode) -> None:
        self.matmul_mode: MatmulMode = matmul_mode
        self.k, self.num_tokens = tokens.experts_Sk.shape[1], len(tokens.x_SM)
        self.num_assignments = tokens.num_assignments
        order_R, inverse_R, self.ends_e = sort_by_expert(tokens.experts_Sk, len(weights.down_eMF))
        self.is_local_R = tokens.experts_Sk.flatten() >= 0
        if self.num_assignments is None:
            # Only the device knows whether there are assignments without an expert. They count as the last expert's,
            # and their gates of 0 cancel them: cheaper than masking every matmul. A range is written, not an element: a
            # number for an element would be copied to the device, with a wait.
            self.ends_e[-1:] = len(order_R)
            self.order_R, self.inverse_R = order_R, inverse_R
        else:
            # Indices of assignments with a local expert; the host does not wait for the device to count them.
            local_indices_R = torch.nonzero_static(self.is_local_R, size=self.num_assignments).squeeze(-1)
            self.order_R = order_R[: self.num_assignments]
            self.inverse_R = inverse_R.index_select(0, local_indices_R)
        self.expert_R = tokens.experts_Sk.flatten().index_select(0, self.order_R).clamp(min=0).long()

    def gather(self, source_SX: Tensor) -> Tensor:
        """Gather every assignment's token."""
        return source_SX.index_select(0, self.order_R // self.k)

    def gather_gates(self, gates_Sk: Tensor) -> Tensor:
        """Gather every assignment's gate, 0 without an expert."""
        return gates_Sk.flatten().where(self.is_local_R, 0).index_select(0, self.order_R)

    def restore_gates(self, values_R: Tensor) -> Tensor:
        """Invert ``gather_gates``."""
        if self.num_assignments is None:
            return values_R.index_select(0, self.inverse_R).where(self.is_local_R, 0).view(-1, self.k)
        return values_R.new_zeros(self.num_tokens * self.k).index_copy_(0, self.order_R, values_R).view(-1, self.k)

    def sum_tokens(self, y_RM: Tensor) -> Tensor:
        """Sum over each token's assignments, in choice order, in float32."""
        assignments_RM, sum_dtype = y_RM.index_select(0, self.inverse_R), accumulate_dtype(y_RM.dtype)
        # In backward this is the last reference to one of the largest tensors.
        del y_RM
        if self.num_assignments is None:
            return assignments_RM.unflatten(0, (-1, self.k)).sum(1, dtype=sum_dtype)
        # Tokens have unequal numbers of local experts; segments are summed in a fixed order on every device.
        ends_S = self.is_local_R.view(-1, self.k).sum(1).cumsum(0)
        offsets = torch.cat((ends_S.new_zeros(1), ends_S))
        return torch.segment_reduce(assignments_RM.to(sum_dtype), "sum", offsets=offsets, axis=0, initial=0)

    def multiply(self, x_RI: Tensor, weight_eIO: Tensor) -> Tensor:
        """Multiply every assignment by its expert's weight."""
        return grouped_rows(x_RI, weight_eIO, self.ends_e, matmul_mode=self.matmul_mode)

    def project(self, x_RI: Tensor, weight_eOI: Tensor | QuantizedExperts, update: Update | None) -> Tensor:
        """Compute every assignment's projection [R, O], with the update to its weight."""
        out_RO = self.multiply(x_RI, whole(weight_eOI).mT)
        if update is None:
            return out_RO
        return out_RO.add_(self.multiply(self.multiply(x_RI, update.a_erI.mT), update.b_eOr.mT))

    def project_backward(self, dy_RO: Tensor, weight_eOI: Tensor | QuantizedExperts, update: Update | None) -> Tensor:
        """Compute ``project``'s gradient for x."""
        dx_RI = self.multiply(dy_RO, whole(weight_eOI))
        if update is None:
            return dx_RI
        return dx_RI.add_(self.multiply(self.multiply(dy_RO, update.b_eOr), update.a_erI))

    def add_update_gradients(
        self, a: GradientSum | None, b: GradientSum | None, dy_RO: Tensor, x_RI: Tensor, update: Update | None
    ) -> None:
        """Add ``project``'s gradients for an update to their sums."""
        if update is None:
            return
        if a is not None:
            a.add(self.outer(self.multiply(dy_RO, update.b_eOr), x_RI))
        if b is not None:
            b.add(self.outer(dy_RO, self.multiply(x_RI, update.a_erI.mT)))

    def outer(self, dy_RO: Tensor, x_RI: Tensor) -> Tensor:
        """Sum dyᵀ · x per expert."""
        return grouped_outer(dy_RO, x_RI, self.ends_e, matmul_mode=self.matmul_mode)

    def gather_bias(self, bias_eO: Tensor) -> Tensor:
        """Gather the bias for every assignment."""
        return bias_eO.index_select(0, self.expert_R)

    def sum_by_expert(self, dy_RO: Tensor) -> Tensor:
        """Sum over every expert's assignments."""
        return sum_by_expert(dy_RO, self.ends_e)
