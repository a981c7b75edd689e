"""The kernels as PyTorch operators: ``longctx::attention_forward`` and ``longctx::attention_backward``.

Operators take plain values: slices as a table, the kernel by name and the scores field by field.

Axes: B batch, t query rows, s key rows, H query heads, K key/value heads, D query/key head size, V value head size, N
buckets of a bias table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from longctx.kernels.attention.kernel_interface import Gradients, RelativeBias, ScoreRules
from longctx.kernels.attention.kernel_selection import KERNELS
from longctx.kernels.dtypes import accumulate_dtype

# torch.compile traces operators through their fake implementations, which only compute result shapes, so a kernel never
# runs (or breaks the graph) during tracing.
_SCORES = (
    "str kernel, float scale, float? softcap, Tensor? alibi_slopes, Tensor? bias_table, int max_distance, "
    "bool bidirectional"
)
_library = torch.library.Library("longctx", "DEF")
_library.define(f"attention_forward(Tensor q, Tensor k, Tensor v, Tensor slices, {_SCORES}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor slices, {_SCORES}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def forward(
    kernel: str, q_BtHD: Tensor, k_BsKD: Tensor, v_BsKV: Tensor, slices: Tensor, *, scores: ScoreRules
) -> tuple[Tensor, Tensor]:
    """Call the named kernel's ``forward`` through the operator.

    Autograd does not record this: call it inside an ``autograd.Function``.
    """
    options = _plain(slices, kernel, scores)
    return torch.ops.longctx.attention_forward.default(q_BtHD, k_BsKD, v_BsKV, *options)


def backward(
    kernel: str,
    dout_BtHV: Tensor,
    q_BtHD: Tensor,
    k_BsKD: Tensor,
    v_BsKV: Tensor,
    out_BtHV: Tensor,
    lse_BtH: Tensor,
    slices: Tensor,
    *,
    scores: ScoreRules,
) -> Gradients:
    """Call the named kernel's ``backward`` through the operator."""
    options = _plain(slices, kernel, scores)
    dq, dk, dv, dbias_table = torch.ops.longctx.attention_backward.default(
        dout_BtHV, q_BtHD, k_BsKD, v_BsKV, out_BtHV, lse_BtH, *options
    )
    # operators can only return tensors: an empty one stands for no gradient
    if scores.relative_bias is None:
        dbias_table = None
    return Gradients(dq, dk, dv, dbias_table)


def _plain(slices: Tensor, kernel: str, scores: ScoreRules) -> tuple:
    """Flatten slices, kernel and scores into the operators' non-tensor arguments."""
    table_NH, max_distance, bidirectional = None, 0, False
    bias = scores.relative_bias
    if bias is not None:
        table_NH, max_distance, bidirectional = bias.table_NH, bias.max_distance, bias.bidirectional
    slopes_H = scores.alibi_slopes_H
    return slices, kernel, scores.scale, scores.softcap, slopes_H, table_NH, max_distance, bidirectional


def _scores(
    scale: float,
    softcap: float | None,
    slopes_H: Tensor | None,
    table_NH: Tensor | None,
    max_distance: int,
    bidirectional: bool,
) -> ScoreRules:
    """Rebuild scores from the arguments made by ``_plain``, except slices and kernel."""
    bias = None
    if table_NH is not None:
        bias = RelativeBias(table_NH, max_distance, bidirectional)
    return ScoreRules(scale=scale, softcap=softcap, alibi_slopes_H=slopes_H, relative_bias=bias)


def _forward(q: Tensor, k: Tensor, v: Tensor, slices: Tensor, kernel: str, *scores: Any) -> tuple[Tensor, Tensor]:
    out, lse = KERNELS[kernel].forward(q, k, v, slices, scores=_scores(*scores))
    return out.contiguous(), lse.contiguous()  # the strides that the fake implementation promises


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    slices: Tensor,
    kernel: str,
    *scores: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = KERNELS[kernel].backward(dout, q, k, v, out, lse, slices, scores=_scores(*scores)).widened()
    dbias_table = q.new_empty(0)
    if grads.dbias_table_NH is not None:
        dbias_table = grads.dbias_table_NH.to(accumulate_dtype(q.dtype))
    # contiguous and in these dtypes, as the fake implementation promises
    return grads.dq_BtHD.contiguous(), grads.dk_BsKD.contiguous(), grads.dv_BsKV.contiguous(), dbias_table.contiguous()


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty(q.shape[:-1] + v.shape[-1:], dtype=accumulate_dtype(q.dtype))
    return out, q.new_empty(q.shape[:-1], dtype=torch.float64)


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape, dtype=accumulate_dtype(x.dtype)) for x in (q, k, v))
    table = rest[-3]
    dbias_table = q.new_empty(0)
    if table is not None:
        dbias_table = table.new_empty(table.shape, dtype=dq.dtype)
    return dq, dk, dv, dbias_table


for _name, _kernel_call, _fake in (
    ("attention_forward", _forward, _fake_forward),
    ("attention_backward", _backward, _fake_backward),
):
    _library.impl(_name, _kernel_call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"longctx::{_name}", _fake, lib=_library)
