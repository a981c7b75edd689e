"""ResidualStream: the residual stream between layers that process their tokens by chunks.

Autograd does not see it as a tensor. Its values, and in backward its gradient, are in a store; layers pass on a
*handle*, an empty tensor that puts their backward passes in order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.errors import ConfigError
from longctx.model.async_copies import AsyncCopies
from longctx.model.chunks.chunk_store import ChunkStore, DeviceStore, HostMemory, Stored
from longctx.model.chunks.disk import DiskStore, disk_in
from longctx.model.training_pass import Execution


# Why a handle: if a stream on the host or a disk were a tensor, autograd would add up its gradients there and wait for
# copies. An empty tensor keeps the layers' order, and ZeRO-3's hooks find a tensor on both sides of each block.
# Invariant: ``values`` and ``gradient`` have one owner at a time, so a layer may overwrite what it has taken.
@dataclass(eq=False)
class ResidualStream:
    """One forward pass's residual stream, and its split into chunks and head groups."""

    store: ChunkStore
    chunks: Sequence[slice]
    """Token ranges on this rank, in order."""
    num_tokens: int
    head_groups: int = 1
    """Number of head groups that go through attention one after another."""
    values: Stored | None = None
    """Residual stream after the last layer that has run forward."""
    gradient: Stored | None = None
    """Gradient before the last layer that has run backward."""

    def take_values(self) -> Stored:
        """Return the residual stream that a layer reads; the caller then owns it."""
        assert self.values is not None, "the residual stream has no values"
        values, self.values = self.values, None
        return values

    def take_gradient(self) -> Stored:
        """Return a layer's output gradient; the caller then owns it."""
        if self.gradient is None:
            raise ConfigError(
                "chunked layers save activations for one backward pass, and this is a second one through the same "
                "graph. Run forward again, or set chunk_tokens=0."
            )
        gradient, self.gradient = self.gradient, None
        return gradient

    def branch(self) -> ResidualStream:
        """Return another, empty stream for these tokens."""
        return replace(self, values=None, gradient=None)

    def enter(self, x_BtM: Tensor) -> Tensor:
        """Start with these values; return the handle for the first layer."""
        return _Enter.apply(x_BtM, self)

    def leave(self, handle: Tensor) -> Tensor:
        """Return the residual stream [B, t, M] after the last layer."""
        return _Leave.apply(handle, self)


def new_stream(execution: Execution, tokens_Bt: Tensor) -> ResidualStream | None:
    """Create the residual stream for these tokens; None if layers do not use chunks (``Execution.chunk_tokens``)."""
    if not execution.chunk_tokens:
        return None
    num_tokens = tokens_Bt.shape[1]
    store: ChunkStore = DeviceStore()
    chunks = split_tokens(num_tokens, execution.chunk_tokens)
    if execution.store == "host":
        store = HostMemory(AsyncCopies(tokens_Bt.device))
    if execution.store == "disk":
        store = DiskStore(disk_in(execution.store_path), AsyncCopies(tokens_Bt.device), chunks)
    return ResidualStream(store, chunks, num_tokens, execution.head_groups)


def split_tokens(num_tokens: int, chunk_tokens: int) -> list[slice]:
    """Split tokens into chunks of at most ``chunk_tokens``, equal in size up to one token; one chunk for 0 tokens."""
    count = max(1, math.ceil(num_tokens / chunk_tokens))
    # A short last chunk would take a device as long as a full one, and a single token would need its own compiled
    # graph.
    starts = [number * num_tokens // count for number in range(count + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtM: Tensor, stream: ResidualStream) -> Tensor:
        ctx.stream = stream
        stream.values = stream.store.put(x_BtM)
        return x_BtM.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor):  # type: ignore[override]
        return ctx.stream.take_gradient().whole().wait(), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, stream: ResidualStream) -> Tensor:
        ctx.stream = stream
        return stream.take_values().whole().wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx_BtM: Tensor):  # type: ignore[override]
        ctx.stream.gradient = ctx.stream.store.put(dx_BtM)
        return dx_BtM.new_empty(0), None
