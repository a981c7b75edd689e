"""Gradients for tables with a row per vocabulary id, some rows at a time.

Axes: B batch rows, t tokens of this rank, c tokens in a chunk, M model width, V vocabulary, v table rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.matmul import row_tiles
from longctx.model.chunks.chunk_store import Stored, in_turn
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.layers.linear import Embedding

SUMMED_VALUES = 1 << 25
"""Table values that are summed at once, in float32: 128 MiB."""


def is_summed_by_rows(num_values: int) -> bool:
    """Return whether the gradient for a table with ``num_values`` values is summed some rows at a time."""
    return num_values > 2 * SUMMED_VALUES


# In float32 a large vocabulary's gradient may be a run's largest tensor. Summed some rows at a time, only these are in
# float32, and each row range reads all token chunks once.
def gradient_by_rows(weight_VM: Tensor, sum_of: Callable[[slice], Tensor]) -> Tensor:
    """Build a table's gradient from ``sum_of``, which returns a row range [v, M]."""
    # Each row is written once, so the full gradient needs no float32 sum.
    gradient_VM = torch.empty_like(weight_VM)
    V, M = weight_VM.shape
    for rows in row_tiles(V, max(1, SUMMED_VALUES // M)):
        gradient_VM[rows] = sum_of(rows)
    return gradient_VM


class TokenTable(Embedding):
    """Token embedding that can start a residual stream."""

    def forward(self, input: Tensor, stream: ResidualStream | None = None, factor: Tensor | None = None) -> Tensor:
        """Return the table rows [B, t, M] for tokens [B, t].

        With a ``stream``, start it with the rows, times ``factor`` if given, and return its handle for the first layer.
        Then neither all tokens' rows nor their gradients are on the device at once, unless the stream's store is there.
        """
        if stream is None:
            return super().forward(input)
        return _EnterRows.apply(self.weight, stream, input, factor)


class _EnterRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, weight_VM: Tensor, stream: ResidualStream, tokens_Bt: Tensor, factor: Tensor | None
    ) -> Tensor:
        ctx.stream = stream
        ctx.save_for_backward(weight_VM, tokens_Bt, factor)
        values: Stored | None = None
        for tokens in stream.chunks:
            x_BcM = _scaled(functional.embedding(tokens_Bt[:, tokens], weight_VM), factor)
            values = values or stream.store.empty_chunks(stream.num_tokens, x_BcM)
            values.write(tokens, x_BcM)
        stream.values = values
        return weight_VM.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor):  # type: ignore[override]
        weight_VM, tokens_Bt, factor = ctx.saved_tensors
        dx = ctx.stream.take_gradient()

        def chunks() -> Iterator[tuple[Tensor, Tensor]]:
            for tokens, (dx_BcM,) in in_turn(ctx.stream.chunks, [dx]):
                yield tokens_Bt[:, tokens], _scaled(dx_BcM, factor)

        def sum_of(rows: slice) -> Tensor:
            return _sum_of_rows(chunks(), rows, weight_VM)

        return gradient_by_rows(weight_VM, sum_of), None, None, None


def _sum_of_rows(chunks: Iterator[tuple[Tensor, Tensor]], rows: slice, weight_VM: Tensor) -> Tensor:
    """Sum the gradient for a row range [v, M], from each chunk's ids and row gradients."""
    v, dtype = rows.stop - rows.start, accumulate_dtype(weight_VM.dtype)
    total_vM = weight_VM.new_zeros(v, weight_VM.shape[1], dtype=dtype)
    for ids_Bc, dx_BcM in chunks:
        ids_Bc = ids_Bc - rows.start
        # Ids in other rows count as padding, which the operator ignores: shapes depend on no value, and it adds in one
        # order on every device.
        ids_Bc = ids_Bc.where((ids_Bc >= 0) & (ids_Bc < v), v)
        part = torch.ops.aten.embedding_dense_backward(dx_BcM.to(dtype), ids_Bc, v + 1, v, False)
        total_vM += part[:v]
    return total_vM


def _scaled(x: Tensor, factor: Tensor | None) -> Tensor:
    if factor is None:
        return x
    return x * factor
