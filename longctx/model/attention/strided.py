"""Sparse attention (Child et al., arXiv 1904.10509): a window, and before it every ``stride``-th token, in one softmax.

Tokens whose places in the document are equal modulo the stride are a *class*. What a query sees before its window is
the part of its class that lies at least ``reach`` tokens back, the first multiple of the stride that is no less than
the window. With rows sorted by class that is causal attention within runs of neighbours: any kernel computes it, on
gathered rows, in proportion to what is seen. Its result joins the window's by their log-sum-exps.

Axes: B batch, t query rows, s key rows, H query heads, K key/value heads, D query/key head size, V value head size,
n and m rows that are gathered.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch

from longctx.kernels.attention.slices import AttentionSlice, slice_table
from longctx.model.attention.work import Work


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


def strided_work(pieces: Iterable[Piece], window: int, stride: int) -> Work | None:
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
    return Work(torch.cat(queries), torch.cat(keys), slice_table(slices)) if slices else None


def _newest(q_start: int, q_stop: int, k_start: int, k_stop: int, back: int, stride: int) -> AttentionSlice:
    """The newest queries of a class and its keys; the last of each are ``back`` tokens apart."""
    apart = q_stop - k_stop
    return AttentionSlice(q_start, q_stop, k_start, k_stop, lo=apart, step=stride, offset=back - stride * apart)
