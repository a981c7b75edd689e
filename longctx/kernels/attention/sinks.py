"""Learnable attention sinks (GPT-OSS): a logit for every head that takes a share of each query's softmax and adds
nothing. They are a correction after all keys were merged, so they work with every kernel and any number of ranks.

Axes: B batch, t query rows, H query heads, V value head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype


def apply_sinks(out_BtHV: Tensor, lse_BtH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return output (in its dtype) and float64 log-sum-exp after the sinks have taken their share; both new tensors.

    Given these two, a kernel's backward returns the exact dq, dk and dv. A row without a key keeps output 0; its
    log-sum-exp is the sink's.
    """
    lse_BtH = lse_BtH.double()
    total_BtH = torch.logaddexp(lse_BtH, sinks_H.double().expand_as(lse_BtH))
    return out_BtHV * _share(lse_BtH, total_BtH).to(out_BtHV.dtype).unsqueeze(-1), total_BtH


def sinks_gradient(dout_BtHV: Tensor, out_BtHV: Tensor, lse_BtH: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the sinks' gradient [H] from these query rows, in float64, given the results of ``apply_sinks``.

    A sink is a key whose value is zero, so d score = p · (dout·0 − dout·out) with p = exp(sink − lse). Summed over the
    ranks that hold the query rows it is the exact gradient.
    """
    partial = accumulate_dtype(out_BtHV.dtype)
    delta_BtH = (dout_BtHV.to(partial) * out_BtHV.to(partial)).sum(-1, dtype=torch.float64)
    weights_BtH = _share(sinks_H.double().expand_as(lse_BtH), lse_BtH.double())
    return -(weights_BtH * delta_BtH).sum((0, 1))


def _share(part: Tensor, total: Tensor) -> Tensor:
    """Return exp(part − total), and 0 if both are −∞: a row without a key and with its sink off. NaN stays NaN."""
    return torch.exp(part - total.masked_fill(total == -torch.inf, 0.0))
