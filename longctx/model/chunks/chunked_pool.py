"""Last norm and sums by document, one token chunk at a time, without all hidden states at once.

Axes: B rows, c tokens in a chunk, M model width, S sums.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.model.chunks.chunk_store import in_turn
from longctx.model.chunks.layer_parts import ChunkBackward, leaves
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.token_pool import TokenPool


def chunked_pool(stream: ResidualStream, norm: nn.Module | None, pool: TokenPool, handle: Tensor) -> Tensor:
    """Compute ``TokenPool.apply`` [S, M] for the residual stream after the last layer; its last ``norm`` is applied
    here.
    """
    weights: list[Tensor] = []
    if norm is not None:
        weights = list(norm.parameters())
    sums_SM: Tensor = _ChunkedSums.apply(handle, stream, norm, pool, *weights)  # pyright: ignore[reportAssignmentType]
    return pool.scaled(sums_SM)


class _ChunkedSums(torch.autograd.Function):
    """Autograd function for the sums: backward computes each chunk's norm again, for its gradient."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, stream: ResidualStream, norm: nn.Module | None, pool: TokenPool, *weights: Tensor
    ) -> Tensor:
        ctx.stream, ctx.norm, ctx.pool, ctx.weights = stream, norm, pool, weights
        x = stream.take_values()
        ctx.x, ctx.dtype = x, handle.dtype
        sums_SM: Tensor | None = None
        for tokens, (x_BcM,) in in_turn(stream.chunks, [x]):
            hidden_BcM = x_BcM if norm is None else norm(x_BcM)
            of_chunk = pool.of_chunk(hidden_BcM, tokens)
            sums_SM = of_chunk if sums_SM is None else sums_SM.add_(of_chunk)
        assert sums_SM is not None, "a stream has at least one chunk"
        return sums_SM

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout_SM: Tensor):  # type: ignore[override]
        x, chunk_backward = ctx.x, ChunkBackward(ctx.weights)
        for tokens, (x_BcM,) in in_turn(ctx.stream.chunks, [x]):
            dnormed_BcM = ctx.pool.gradient_of_chunk(dout_SM, tokens, x_BcM.dtype)
            if ctx.norm is not None:
                with torch.enable_grad():
                    inputs = leaves([x_BcM])
                    (dnormed_BcM,) = chunk_backward([ctx.norm(inputs[0])], inputs, [dnormed_BcM])
            x.write(tokens, dnormed_BcM)
        # The gradient has replaced the values.
        ctx.stream.gradient, ctx.x = x, None
        return dout_SM.new_empty(0, dtype=ctx.dtype), None, None, None, *chunk_backward.results()
