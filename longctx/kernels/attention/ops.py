"""The kernels as PyTorch operators: ``longctx::attention_forward`` and ``longctx::attention_backward``.

An operator is opaque to ``torch.compile``, which needs no more than the shapes of its results. Operators take plain
values, so pairs travel as an int64 tensor on the CPU (as data: other documents are no reason to compile again), the
kernel by name and the scores field by field.

Axes: B batch, t query rows, s key rows, H query heads, K key/value heads, D query/key head size, V value head size,
P pairs, N buckets of a bias table.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from longctx.kernels.attention.contract import AttentionSlice, Gradients, RelativeBias, Scores
from longctx.kernels.attention.select import KERNELS
from longctx.kernels.dtypes import accumulate_dtype

OPEN = 2**62
"""Stands for a band's missing bound in a table of pairs."""

_SCORES = (
    "str kernel, float scale, float? softcap, Tensor? alibi_slopes, Tensor? bias_table, int max_distance, "
    "bool bidirectional"
)
_library = torch.library.Library("longctx", "DEF")
_library.define(f"attention_forward(Tensor q, Tensor k, Tensor v, Tensor pairs, {_SCORES}) -> (Tensor, Tensor)")
_library.define(
    f"attention_backward(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor pairs, {_SCORES}) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)


def forward(
    kernel: str,
    q_BtHD: Tensor,
    k_BsKD: Tensor,
    v_BsKV: Tensor,
    pairs: Sequence[AttentionSlice] | Tensor,
    *,
    scores: Scores,
) -> tuple[Tensor, Tensor]:
    """What the ``forward`` of the kernel of that name returns, through the operator; ``pairs`` may be a
    ``slice_table``.

    Autograd sees nothing of this: call it inside an ``autograd.Function``.
    """
    return torch.ops.longctx.attention_forward.default(q_BtHD, k_BsKD, v_BsKV, *_plain(pairs, kernel, scores))


def backward(
    kernel: str,
    dout_BtHV: Tensor,
    q_BtHD: Tensor,
    k_BsKD: Tensor,
    v_BsKV: Tensor,
    out_BtHV: Tensor,
    lse_BtH: Tensor,
    pairs: Sequence[AttentionSlice] | Tensor,
    *,
    scores: Scores,
) -> Gradients:
    """What the ``backward`` of the kernel of that name returns, through the operator."""
    tensors = (dout_BtHV, q_BtHD, k_BsKD, v_BsKV, out_BtHV, lse_BtH)
    grads = torch.ops.longctx.attention_backward.default(*tensors, *_plain(pairs, kernel, scores))
    return Gradients(*grads) if scores.relative_bias is not None else Gradients(*grads[:3])


@lru_cache(maxsize=1024)
def slice_table(pairs: tuple[AttentionSlice, ...]) -> Tensor:
    """The pairs as rows [P, 8] of an int64 tensor on the CPU, fields in ``AttentionSlice``'s order, ``OPEN`` for
    None."""
    rows = [(p.q_start, p.q_stop, p.k_start, p.k_stop, _bound(p.lo), _bound(p.hi), p.step, p.offset) for p in pairs]
    return torch.tensor(rows, dtype=torch.int64, device="cpu").view(-1, 8)


def table_slices(table_P8: Tensor) -> tuple[AttentionSlice, ...]:
    """The inverse of ``slice_table``; rows of equal content give the same object again."""
    return _pairs_of_bytes(table_P8.numpy().tobytes())


@lru_cache(maxsize=1024)
def _pairs_of_bytes(content: bytes) -> tuple[AttentionSlice, ...]:
    rows = torch.frombuffer(bytearray(content), dtype=torch.int64).view(-1, 8).tolist() if content else []
    return tuple(
        AttentionSlice(q0, q1, k0, k1, None if lo == OPEN else lo, None if hi == OPEN else hi, step, offset)
        for q0, q1, k0, k1, lo, hi, step, offset in rows
    )


def _bound(value: int | None) -> int:
    return OPEN if value is None else value


def _plain(pairs: Sequence[AttentionSlice] | Tensor, kernel: str, scores: Scores) -> tuple:
    """The arguments that follow the operators' tensors."""
    table = pairs if isinstance(pairs, Tensor) else slice_table(tuple(pairs))
    bias = scores.relative_bias
    return (
        table,
        kernel,
        scores.scale,
        scores.softcap,
        scores.alibi_slopes_H,
        None if bias is None else bias.table_NH,
        0 if bias is None else bias.max_distance,
        False if bias is None else bias.bidirectional,
    )


def _scores(
    scale: float,
    softcap: float | None,
    slopes_H: Tensor | None,
    table_NH: Tensor | None,
    max_distance: int,
    bidirectional: bool,
) -> Scores:
    bias = None if table_NH is None else RelativeBias(table_NH, max_distance, bidirectional)
    return Scores(scale=scale, softcap=softcap, alibi_slopes_H=slopes_H, relative_bias=bias)


def _forward(q: Tensor, k: Tensor, v: Tensor, pairs: Tensor, kernel: str, *scores: Any) -> tuple[Tensor, Tensor]:
    out, lse = KERNELS[kernel].forward(q, k, v, table_slices(pairs), scores=_scores(*scores))
    return out.contiguous(), lse.contiguous()  # the strides that the fake implementation promises


def _backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairs: Tensor,
    kernel: str,
    *scores: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grads = KERNELS[kernel].backward(dout, q, k, v, out, lse, table_slices(pairs), scores=_scores(*scores))
    dtable = q.new_empty(0) if grads.dtable_NH is None else grads.dtable_NH.to(accumulate_dtype(q.dtype))
    return grads.dq_BtHD.contiguous(), grads.dk_BsKD.contiguous(), grads.dv_BsKV.contiguous(), dtable.contiguous()


def _fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    out = q.new_empty((*q.shape[:-1], v.shape[-1]), dtype=accumulate_dtype(q.dtype))
    return out, q.new_empty(q.shape[:-1], dtype=torch.float64)


def _fake_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (x.new_empty(x.shape, dtype=accumulate_dtype(x.dtype)) for x in (q, k, v))
    table = rest[-3]
    dtable = q.new_empty(0) if table is None else table.new_empty(table.shape, dtype=dq.dtype)
    return dq, dk, dv, dtable


for _name, _kernel_call, _fake in (
    ("attention_forward", _forward, _fake_forward),
    ("attention_backward", _backward, _fake_backward),
):
    _library.impl(_name, _kernel_call, "CompositeExplicitAutograd")
    torch.library.register_fake(f"longctx::{_name}", _fake, lib=_library)
