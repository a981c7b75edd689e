"""Work: query rows, the key rows that they see, and slices; one form for dense, windowed and strided work.

A process computes a list of entries over the same keys. The first covers every local query row; the others' results are
merged into it, in order.

Axes: B batch, t query rows, s key rows, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from longctx.kernels.attention.kernel_interface import Gradients, merge_

Rows = slice | Tensor
"""A contiguous row range, or an int64 index that gathers rows in another order, each row at most once."""

EVERY_ROW = slice(None)


class Work(NamedTuple):
    """Slices between some query rows and some key rows."""

    query_rows: Rows
    key_rows: Rows
    slices: Tensor
    """Slice table (``longctx/kernels/attention/slices.py``); row indices are relative to ``query_rows`` and
    ``key_rows``."""


def forward_work(
    q_BtHD: Tensor,
    k_BsKD: Tensor,
    v_BsKV: Tensor,
    work: Sequence[Work],
    forward: Callable[..., tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor]:
    """Compute output [B, t, H, V] and log-sum-exp [B, t, H] over all entries, in the kernel's dtypes.

    ``forward(q, k, v, slices)`` is a kernel's, with its scores bound.
    """
    # The first entry covers every row, so the others merge into its result.
    out, lse = _forward_entry(q_BtHD, k_BsKD, v_BsKV, work[0], forward)
    for entry in work[1:]:
        entry_out, entry_lse = _forward_entry(q_BtHD, k_BsKD, v_BsKV, entry, forward)
        _merge_rows_(out, lse, entry.query_rows, entry_out, entry_lse)
    return out, lse


def backward_work(
    dout_BtHV: Tensor,
    q_BtHD: Tensor,
    k_BsKD: Tensor,
    v_BsKV: Tensor,
    out_BtHV: Tensor,
    lse_BtH: Tensor,
    work: Sequence[Work],
    backward: Callable[..., Gradients],
) -> Gradients:
    """Sum the entries' gradients, given the *global* output and log-sum-exp for every query row.

    ``backward(dout, q, k, v, out, lse, slices)`` is a kernel's, with its scores bound. An entry adds to each row once,
    so the summation order is fixed.
    """
    total: Gradients | None = None
    for query_rows, key_rows, slices in work:
        dout, q, out, lse = (_take(x, query_rows) for x in (dout_BtHV, q_BtHD, out_BtHV, lse_BtH))
        k, v = _take(k_BsKD, key_rows), _take(v_BsKV, key_rows)
        # The global log-sum-exp makes each entry's softmax weights final: gradients just add up.
        part = backward(dout, q, k, v, out, lse, slices)
        if total is None:  # the first entry covers every row
            total = part
            continue
        total = total.widened()
        _add_rows_(total.dq_BtHD, query_rows, part.dq_BtHD)
        _add_rows_(total.dk_BsKD, key_rows, part.dk_BsKD)
        _add_rows_(total.dv_BsKV, key_rows, part.dv_BsKV)
        if total.dbias_table_NH is not None and part.dbias_table_NH is not None:
            total = total._replace(dbias_table_NH=total.dbias_table_NH + part.dbias_table_NH)
    assert total is not None, "no attention work"
    return total


def _forward_entry(
    q: Tensor, k: Tensor, v: Tensor, entry: Work, forward: Callable[..., tuple[Tensor, Tensor]]
) -> tuple[Tensor, Tensor]:
    query_rows, key_rows, slices = entry
    return forward(_take(q, query_rows), _take(k, key_rows), _take(v, key_rows), slices)


def _take(x: Tensor, rows: Rows) -> Tensor:
    """Return the given rows: a view for a range, a copy for an index."""
    if rows is EVERY_ROW:
        return x
    if isinstance(rows, slice):
        return x[:, rows]
    return x.index_select(1, rows.to(x.device, non_blocking=True))


def _merge_rows_(out: Tensor, lse: Tensor, rows: Rows, part_out: Tensor, part_lse: Tensor) -> None:
    """Merge some rows' result into the total, in place."""
    if isinstance(rows, slice):
        merge_(out[:, rows], lse[:, rows], part_out, part_lse)
        return
    # Gathered rows are copies: merge there, then write back. No row occurs twice, so the result is deterministic.
    index = rows.to(out.device, non_blocking=True)
    row_out, row_lse = out.index_select(1, index), lse.index_select(1, index)
    merge_(row_out, row_lse, part_out, part_lse)
    out.index_copy_(1, index, row_out)
    lse.index_copy_(1, index, row_lse)


def _add_rows_(total: Tensor, rows: Rows, part: Tensor) -> None:
    """Add some rows' gradient to the total, in place."""
    if isinstance(rows, slice):
        total[:, rows] += part
    else:
        total.index_add_(1, rows.to(total.device, non_blocking=True), part)
