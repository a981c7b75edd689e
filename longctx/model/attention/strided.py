"""Sparse attention (Child et al., arXiv 1904.10509): a window, and before it every ``stride``-th token, in one softmax.

Axes: B batch, t query rows, s key rows, H query heads, K key/value heads, D query/key head size, V value head size, n
and m gathered rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.attention.slices import AttentionSlice, slice_table, table_slices
from longctx.model.attention.attention_work import Work


class StridedPiece(NamedTuple):
    """A document's newest queries against all of its tokens."""

    query_row: int
    """Query row that the document's first token has, or would have."""
    key_row: int
    """Key row of the document's first token."""
    tokens: int
    first_query: int
    """Document index of the first query."""


def class_lookback(window: int, stride: int) -> int:
    """Return the distance in tokens from a query back to the nearest member of its class outside its window."""
    return -(-window // stride) * stride


def whole_documents(cu_seqlens: tuple[int, ...]) -> list[StridedPiece]:
    """Return all documents in a sequence that one process holds, as pieces."""
    return [StridedPiece(query_row=a, key_row=a, tokens=b - a, first_query=0) for a, b in pairwise(cu_seqlens)]


def continuation(num_queries: int, num_keys: int) -> list[StridedPiece]:
    """Return the newest ``num_queries`` tokens in one document, as a piece."""
    before = num_keys - num_queries
    # The document's first token would be ``before`` rows ahead of the first query.
    return [StridedPiece(query_row=-before, key_row=0, tokens=num_keys, first_query=before)]


# Strided attention as causal attention on gathered rows. Tokens with equal document indices modulo the stride form a
# class. Before its window, a query sees the class members at least ``class_lookback`` tokens back, the first multiple
# of the stride that is no less than the window. Sorted by class, these pairs are causal attention within ranges of
# neighbouring rows: any kernel computes them on gathered rows, in time proportional to the visible keys. The result is
# merged with the window's by their log-sum-exps. Invariant: window and class share no key, so each counts once.
def strided_work(pieces: Iterable[StridedPiece], window: int, stride: int) -> Work | None:
    """Build these queries' work before their windows, if there is any.

    It names only rows with work. If all queries in a class are present, it has as many queries as keys: plain causal.
    """
    back = class_lookback(window, stride)
    queries: list[Tensor] = []
    keys: list[Tensor] = []
    slices: list[AttentionSlice] = []
    q, k = 0, 0  # gathered rows so far
    for piece in pieces:
        # Queries before ``back`` see their entire class within the window.
        first = max(piece.first_query, back)
        # Loop over each class's first query; a class is one range of gathered rows.
        for index in range(first, min(first + stride, piece.tokens)):
            query_indices = range(index, piece.tokens, stride)
            key_indices = range(index % stride, query_indices[-1] - back + 1, stride)
            queries.append(piece.query_row + _arange(query_indices))
            keys.append(piece.key_row + _arange(key_indices))
            q_stop, k_stop = q + len(query_indices), k + len(key_indices)
            slices.append(_newest(q, q_stop, k, k_stop, back, stride))
            q, k = q_stop, k_stop
    if not slices:
        return None
    return Work(torch.cat(queries), torch.cat(keys), slice_table(slices))


def mirrored_work(before: Work) -> Work:
    """Build the work for complete documents' queries ahead of their windows, in bidirectional attention.

    ``before`` is their work before the windows: queries and keys swap roles.
    """
    mirrored = [part.mirrored() for part in table_slices(before.slices)]
    return Work(before.key_rows, before.query_rows, slice_table(mirrored))


def _arange(indices: range) -> Tensor:
    return torch.arange(indices.start, indices.stop, indices.step)


def _newest(q_start: int, q_stop: int, k_start: int, k_stop: int, back: int, stride: int) -> AttentionSlice:
    """Build the slice between a class's newest queries and its keys; the last of each are ``back`` tokens apart."""
    # The offset solves stride·(i − j) + offset = back at the last rows.
    row_distance = q_stop - k_stop
    return AttentionSlice(
        q_start, q_stop, k_start, k_stop, lo=row_distance, step=stride, offset=back - stride * row_distance
    )
