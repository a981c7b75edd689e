"""Sparse attention (Child et al., arXiv 1904.10509): a window, and before it every ``stride``-th token, in one softmax.

Tokens whose places in the document are equal modulo the stride are a *class*. What a query sees before its window is
the part of its class that lies at least ``reach`` tokens back, the first multiple of the stride that is no less than
the window. With rows sorted by class that is causal attention within runs of neighbours: any kernel computes it, on
gathered rows, in proportion to what is seen. Its result joins the window's by their log-sum-exps.

Axes: B batch, t query rows, s key rows, H query heads, K key/value heads, D query/key head size, V value head size,
n and m rows that are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.attention.contract import Gradients, merge_
from longctx.kernels.attention.slices import AttentionSlice, slice_table


class Strided(NamedTuple):
    """Work between rows that are gathered in another order first."""

    queries_n: Tensor
    """Query rows (int64), each at most once, in the order in which the slices count them."""
    keys_m: Tensor
    """Key rows likewise."""
    slices: Tensor
    """The work, a ``slice_table``."""


class Piece(NamedTuple):
    """The newest queries of a document against all of its tokens."""

    query_row: int
    """Row that the document's first token has, or would have, among the queries."""
    key_row: int
    """Row of its first token among the keys."""
    tokens: int
    first_query: int
    """Place in the document of the first query."""


def reach(window: int, stride: int) -> int:
    """Tokens from a query back to the nearest one of its class outside of its window."""
    return -(-window // stride) * stride


def whole_documents(cu_seqlens: tuple[int, ...]) -> list[Piece]:
    """All documents of a sequence that lies in one process."""
    return [Piece(a, a, b - a, 0) for a, b in pairwise(cu_seqlens)]


def continuation(num_queries: int, num_keys: int) -> list[Piece]:
    """The newest ``num_queries`` tokens of one document."""
    before = num_keys - num_queries
    return [Piece(-before, 0, num_keys, before)]


def strided_work(pieces: Iterable[Piece], window: int, stride: int) -> Strided | None:
    """What these queries see before their windows; None when that is nothing.

    Only rows with work are named. A class whose queries are all there has as many queries as keys: plain causal.
    """
    back = reach(window, stride)
    queries, keys, slices = [], [], []
    q, k = 0, 0
    for query_row, key_row, tokens, first_query in pieces:
        first = max(first_query, back)
        for place in range(first, min(first + stride, tokens)):  # the first query of each class
            mine = range(place, tokens, stride)
            theirs = range(place % stride, mine[-1] - back + 1, stride)
            queries.append(torch.arange(query_row + place, query_row + tokens, stride))
            keys.append(torch.arange(key_row + theirs.start, key_row + theirs.stop, stride))
            slices.append(_newest(q, q + len(mine), k, k + len(theirs), back, stride))
            q, k = q + len(mine), k + len(theirs)
    return Strided(torch.cat(queries), torch.cat(keys), slice_table(slices)) if slices else None


def _newest(q_start: int, q_stop: int, k_start: int, k_stop: int, back: int, stride: int) -> AttentionSlice:
    """The newest queries of a class and its keys; the last of each are ``back`` tokens apart."""
    apart = q_stop - k_stop
    return AttentionSlice(q_start, q_stop, k_start, k_stop, lo=apart, step=stride, offset=back - stride * apart)


def attend_strided_(
    out_BtHV: Tensor,
    lse_BtH: Tensor,
    q_BtHD: Tensor,
    k_BsKD: Tensor,
    v_BsKV: Tensor,
    strided: Strided,
    forward: Callable[..., tuple[Tensor, Tensor]],
) -> None:
    """Fold what queries see in the strided work into their partial results, in place.

    ``forward(q, k, v, slices)`` is a kernel's, its scores given.
    """
    queries, keys = (rows.to(q_BtHD.device) for rows in strided[:2])
    part = forward(_rows(q_BtHD, queries), _rows(k_BsKD, keys), _rows(v_BsKV, keys), strided.slices)
    out, lse = _rows(out_BtHV, queries), _rows(lse_BtH, queries)
    merge_(out, lse, *part)
    out_BtHV.index_copy_(1, queries, out)
    lse_BtH.index_copy_(1, queries, lse)


def add_strided_gradients(
    grads: Gradients,
    of_queries: tuple[Tensor, Tensor, Tensor, Tensor],
    k_BsKD: Tensor,
    v_BsKV: Tensor,
    strided: Strided,
    backward: Callable[..., Gradients],
) -> Gradients:
    """The gradients with those of the strided work added, in place but for the bias table's.

    ``of_queries`` are dout [B, t, H, V], q [B, t, H, D] and the global out [B, t, H, V] and log-sum-exp [B, t, H];
    ``backward(dout, q, k, v, out, lse, slices)`` is a kernel's, its scores given. Each row is added to once, so sums
    have one order.
    """
    queries, keys = (rows.to(k_BsKD.device) for rows in strided[:2])
    dout, q, out, lse = (_rows(x, queries) for x in of_queries)
    part = backward(dout, q, _rows(k_BsKD, keys), _rows(v_BsKV, keys), out, lse, strided.slices)
    grads.dq_BtHD.index_add_(1, queries, part.dq_BtHD)
    grads.dk_BsKD.index_add_(1, keys, part.dk_BsKD)
    grads.dv_BsKV.index_add_(1, keys, part.dv_BsKV)
    if grads.dtable_NH is None or part.dtable_NH is None:
        return grads
    return grads._replace(dtable_NH=grads.dtable_NH + part.dtable_NH)


def _rows(x: Tensor, rows: Tensor) -> Tensor:
    return x.index_select(1, rows)
