"""Experts on an accelerator: all rows at once, in grouped products. A row is a token at one of its experts.

Axes: S tokens here, k choices a token, R rows in the order of their experts, M model width, F FFN width of one expert
(gate and up together: 2F), e experts here; I and O are the input and output width of one product.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.grouped import grouped_outer, grouped_rows, sort_by_expert, sum_by_expert
from longctx.kernels.processor import Products
from longctx.model.experts.parts import Needs, Tokens, Weights, WeightSums, kept_widths
from longctx.model.layers.activations import gated, gated_backward


class _Sorted:
    """Rows in the order of their experts, and grouped products."""

    def __init__(self, tokens: Tokens, num_experts: int, products: Products) -> None:
        self.products: Products = products
        self.k, self.num_tokens, self.num_rows = tokens.experts_Sk.shape[1], len(tokens.x_SM), tokens.num_rows
        order_R, inverse_R, self.ends_e = sort_by_expert(tokens.experts_Sk, num_experts)
        self.is_here_R = tokens.experts_Sk.flatten() >= 0
        if self.num_rows is None:
            # Whether there are rows past the last end, only the device knows. They count as the last expert's, where
            # their gates of 0 make them nothing: cheaper than a look at every row after every product.
            self.ends_e[-1] = len(order_R)
            self.order_R, self.inverse_R = order_R, inverse_R
        else:
            self.order_R = order_R[: self.num_rows]
            self.inverse_R = inverse_R.index_select(0, _where(self.is_here_R, self.num_rows))
        self.expert_R = tokens.experts_Sk.flatten().index_select(0, self.order_R).clamp(min=0).long()

    def take(self, source_SX: Tensor) -> Tensor:
        """Every row's token."""
        return source_SX.index_select(0, self.order_R // self.k)

    def choices(self, gates_Sk: Tensor) -> Tensor:
        """Every row's gate."""
        return gates_Sk.flatten().where(self.is_here_R, 0).index_select(0, self.order_R)

    def give_back(self, values_R: Tensor) -> Tensor:
        """The inverse of ``choices``."""
        if self.num_rows is None:
            return values_R.index_select(0, self.inverse_R).where(self.is_here_R, 0).view(-1, self.k)
        return values_R.new_zeros(self.num_tokens * self.k).index_copy_(0, self.order_R, values_R).view(-1, self.k)

    def sum_tokens(self, y_RM: Tensor) -> Tensor:
        """The sum of each token's rows, in the order of its choices, in float32."""
        rows, partial = y_RM.index_select(0, self.inverse_R), accumulate_dtype(y_RM.dtype)
        if self.num_rows is None:
            return rows.unflatten(0, (-1, self.k)).sum(1, dtype=partial)
        ends_S = self.is_here_R.view(-1, self.k).sum(1).cumsum(0)
        offsets = torch.cat((ends_S.new_zeros(1), ends_S))
        return torch.segment_reduce(rows.to(partial), "sum", offsets=offsets, axis=0, initial=0)

    def rows(self, x_RI: Tensor, weight_eIO: Tensor) -> Tensor:
        """Every row times its expert's weight."""
        return grouped_rows(x_RI, weight_eIO, self.ends_e, products=self.products)

    def outer(self, dy_RO: Tensor, x_RI: Tensor) -> Tensor:
        """Every expert's sum of dyᵀ · x."""
        return grouped_outer(dy_RO, x_RI, self.ends_e, products=self.products)

    def spread(self, bias_eO: Tensor) -> Tensor:
        """Every row's expert's."""
        return bias_eO.index_select(0, self.expert_R)

    def sum_rows(self, dy_RO: Tensor) -> Tensor:
        """Every expert's sum of rows."""
        return sum_by_expert(dy_RO, self.ends_e)


def _where(mask_R: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` places that are set, without waiting for the device to count them."""
    return torch.nonzero_static(mask_R, size=count).squeeze(-1)


def forward_rows(
    tokens: Tokens, weights: Weights, kind: str, *, keep: str, products: Products
) -> tuple[Tensor, list[Tensor]]:
    """Σ over a token's experts here of gate · expert(x), [S, M] in float32 (float64), and what ``keep`` keeps.

    ``keep`` is one of ``dispatch.RECOMPUTE``.
    """
    at = _Sorted(tokens, len(weights.down_eMF), products)
    x, gates = at.take(tokens.x_SM), at.choices(tokens.gates_Sk)
    gate_up = _gate_up_whole(at, x, weights)
    gate, up = gate_up.chunk(2, dim=-1)
    inner = gated(kind, gate, up, gates)
    y = at.rows(inner, weights.down_eMF.mT)
    if weights.down_bias_eM is not None:
        y += (gates.unsqueeze(-1) * at.spread(weights.down_bias_eM)).to(y.dtype)
    return at.sum_tokens(y), [gate_up, inner, x][: len(kept_widths(keep, weights, in_blocks=False))]


def _gate_up_whole(at: _Sorted, x: Tensor, weights: Weights) -> Tensor:
    gate_up = at.rows(x, weights.gate_up_eFM.mT)
    if weights.gate_up_bias_eF is not None:
        gate_up += at.spread(weights.gate_up_bias_eF)
    return gate_up


def backward_rows(
    dout_SM: Tensor,
    tokens: Tokens,
    weights: Weights,
    kind: str,
    kept: list[Tensor],
    *,
    products: Products,
    sums: WeightSums,
    needs: Needs,
) -> tuple[Tensor | None, Tensor]:
    """Gradients for x, [S, M] in float32 (float64), and gates [S, k]; those of the weights are added to ``sums``.

    What is ``kept`` is gone.
    """
    at = _Sorted(tokens, len(weights.down_eMF), products)
    gates, dy = at.choices(tokens.gates_Sk), at.take(dout_SM.to(tokens.x_SM.dtype))
    keeps_rows = len(kept) == 3
    x = kept[2] if keeps_rows else at.take(tokens.x_SM) if needs.gate_up or not kept else None
    if kept:
        gate_up = kept[0]
    else:
        assert x is not None
        gate_up = _gate_up_whole(at, x, weights)
    gate, up = gate_up.chunk(2, dim=-1)
    if sums.down is not None:
        sums.down.add(at.outer(dy, kept[1] if keeps_rows else gated(kind, gate, up, gates)))
    dgate, dup, dgates = gated_backward(kind, at.rows(dy, weights.down_eMF), gate, up, gates)
    assert dgates is not None
    if weights.down_bias_eM is not None:
        wide = dy.to(gates.dtype)
        dgates = dgates + (wide * at.spread(weights.down_bias_eM)).sum(-1)
        if sums.down_bias is not None:
            sums.down_bias.add(at.sum_rows(wide * gates.unsqueeze(-1)))
    dgate_up = torch.cat((dgate, dup), dim=-1)
    kept.clear()
    del gate_up, gate, up, dgate, dup, dy  # the largest there are: free before the last gradients are made
    if sums.gate_up_bias is not None:
        sums.gate_up_bias.add(at.sum_rows(dgate_up))
    if sums.gate_up is not None:
        assert x is not None
        sums.gate_up.add(at.outer(dgate_up, x))
    dx_SM = at.sum_tokens(at.rows(dgate_up, weights.gate_up_eFM)) if needs.x else None
    return dx_SM, at.give_back(dgates)
