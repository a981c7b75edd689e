"""Learnable attention sinks (GPT-OSS): a logit per head that takes a share from each query's softmax and adds no value.

Axes: B batch, t query rows, H query heads, V value head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype


# Sinks are a correction after all keys are merged, so they work with every kernel and any number of ranks.
def apply_sinks(out_BtHV: Tensor, lse_BtH: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor]:
    """Return new output (in its dtype) and float64 log-sum-exp tensors that include the sinks.

    With both, a kernel's backward returns exact dq, dk and dv. A row without a key keeps output 0, and its log-sum-exp
    is the sink's.
    """
    lse_BtH = lse_BtH.double()
    total_BtH = torch.logaddexp(lse_BtH, sinks_H.double().expand_as(lse_BtH))
    return out_BtHV * _share(lse_BtH, total_BtH).to(out_BtHV.dtype).unsqueeze(-1), total_BtH


def sinks_gradient(dout_BtHV: Tensor, out_BtHV: Tensor, lse_BtH: Tensor, sinks_H: Tensor) -> Tensor:
    """Return the sinks' gradient [H] from these query rows, in float64, given the results from ``apply_sinks``.

    Summed over the ranks that hold the query rows, it equals the exact gradient.
    """
    # A sink is a key with value zero, so d score = p · (dout·0 − dout·out) with p = exp(sink − lse).
    partial = accumulate_dtype(out_BtHV.dtype)
    delta_BtH = (dout_BtHV.to(partial) * out_BtHV.to(partial)).sum(-1, dtype=torch.float64)
    weights_BtH = _share(sinks_H.double().expand_as(lse_BtH), lse_BtH.double())
    return -(weights_BtH * delta_BtH).sum((0, 1))


def _share(part: Tensor, total: Tensor) -> Tensor:
    """Return exp(part − total), and 0 if both are −∞: a row without a key whose sink is off. NaN stays NaN."""
    return torch.exp(part - total.masked_fill(total == -torch.inf, 0.0))
