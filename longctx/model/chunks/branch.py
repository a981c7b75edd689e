"""Further residual streams that start where another one ends, one token chunk at a time.

Axes: B rows, t tokens of this rank, c tokens in a chunk, M model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.model.chunks.chunk_store import Stored, in_turn
from longctx.model.chunks.layer_parts import ChunkBackward, leaves
from longctx.model.chunks.residual_stream import ResidualStream

Join = Callable[[Tensor, Tensor], Tensor]
"""Computes the branch's first values from the stream's normed values and those that enter beside them."""


def branch_off(
    stream: ResidualStream,
    branch: ResidualStream,
    handle: Tensor,
    side_input_BtM: Tensor,
    *,
    norm: nn.Module | None,
    join: Join,
    weights: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Start a branch after a stream's last layer; return the stream's handle and the branch's.

    ``weights`` are those that ``norm`` and ``join`` read. The stream's handle must go on to a function that gives it a
    gradient.
    """
    return _BranchOff.apply(handle, side_input_BtM, _Branch(stream, branch, norm, join), *weights)


# The head writes its gradient over x, so the branch keeps its own x.
#
#     forward     chunks: join(norm(x), y)                ->  the branch's values; x goes on to the head
#     backward    chunks: norm and join again, backward   ->  y's gradient, and x's in addition to the head's
class _Branch:
    """One branch in one forward pass and its backward."""

    def __init__(self, stream: ResidualStream, branch: ResidualStream, norm: nn.Module | None, join: Join) -> None:
        self.stream, self.branch, self.norm, self.join = stream, branch, norm, join
        self.kept: list[Stored] = []
        """The stream's values, and those that entered."""

    def forward(self, side_input_BtM: Tensor, *, needs_grad: bool) -> None:
        """Compute the branch's first values."""
        store, chunks, num_tokens = self.stream.store, self.stream.chunks, self.stream.num_tokens
        x = self.stream.take_values()
        # The stream continues with the same values.
        self.stream.values = x
        first: Stored | None = None
        kept: Stored | None = None
        for tokens, (x_BcM,) in in_turn(chunks, [x]):
            first_BcM = self._first(x_BcM, side_input_BtM[:, tokens])
            first = first or store.empty_chunks(num_tokens, first_BcM)
            first.write(tokens, first_BcM)
            if needs_grad:
                kept = kept or store.empty_chunks(num_tokens, x_BcM)
                kept.write(tokens, x_BcM)
        self.branch.values = first
        if kept is not None:
            self.kept = [kept, store.put(side_input_BtM)]

    def backward(self, chunk_backward: ChunkBackward) -> Tensor:
        """Add the branch's contribution to the stream's gradient; return the entering values' gradient."""
        x, side_input = self.kept
        self.kept = []
        dfirst, dx = self.branch.take_gradient(), self.stream.take_gradient()
        dside_input: Stored | None = None
        for tokens, (dfirst_BcM, dx_BcM, x_BcM, side_input_BcM) in in_turn(
            self.stream.chunks, [dfirst, dx, x, side_input]
        ):
            # Recomputing norm and join costs less than keeping the values that their backward reads.
            with torch.enable_grad():
                inputs = leaves([x_BcM, side_input_BcM])
                own_BcM, side_input_BcM = chunk_backward([self._first(inputs[0], inputs[1])], inputs, [dfirst_BcM])
            dx.write(tokens, own_BcM.add_(dx_BcM))
            dside_input = dside_input or self.stream.store.empty(self.stream.num_tokens, side_input_BcM)
            dside_input.write(tokens, side_input_BcM)
        self.stream.gradient = dx
        assert dside_input is not None
        return dside_input.whole().wait()

    def _first(self, x_BcM: Tensor, side_input_BcM: Tensor) -> Tensor:
        if self.norm is not None:
            x_BcM = self.norm(x_BcM)
        return self.join(x_BcM, side_input_BcM)


class _BranchOff(torch.autograd.Function):
    """Autograd function over both handles, so that the head's gradient precedes the branch's in backward."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, side_input_BtM: Tensor, branch: _Branch, *weights: Tensor):
        ctx.branch = branch
        # Saved although the branch holds them: autograd detects an in-place write in between.
        ctx.save_for_backward(*weights)
        branch.forward(side_input_BtM, needs_grad=any(ctx.needs_input_grad))
        return handle.new_empty(0), handle.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhandle: Tensor, _: Tensor):  # type: ignore[override]
        chunk_backward = ChunkBackward(ctx.saved_tensors)
        dside_input_BtM = ctx.branch.backward(chunk_backward)
        found = [dhandle, dside_input_BtM, None]
        found.extend(chunk_backward.results())
        return tuple(found)


def fork(stream: ResidualStream, handle: Tensor) -> tuple[Tensor, ResidualStream, Tensor]:
    """Copy a stream after its last layer, for a second head; return the stream's handle, the copy, and its handle.

    Each head must give its stream a gradient: backward adds up both.
    """
    copy = stream.branch()
    handle, of_copy = _Fork.apply(handle, stream, copy)  # pyright: ignore[reportGeneralTypeIssues]
    return handle, copy, of_copy


# A head writes its gradient over the values that it reads, so two heads need two streams.
class _Fork(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, handle: Tensor, stream: ResidualStream, copy: ResidualStream) -> tuple[Tensor, Tensor]:
        ctx.stream, ctx.copy = stream, copy
        x = stream.take_values()
        for tokens, (x_BcM,) in in_turn(stream.chunks, [x]):
            copy.values = copy.values or stream.store.empty_chunks(stream.num_tokens, x_BcM)
            copy.values.write(tokens, x_BcM)
        stream.values = x
        return handle.new_empty(0), handle.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhandle: Tensor, _: Tensor):  # type: ignore[override]
        dx, dcopy = ctx.stream.take_gradient(), ctx.copy.take_gradient()
        for tokens, (dx_BcM, dcopy_BcM) in in_turn(ctx.stream.chunks, [dx, dcopy]):
            dx.write(tokens, dx_BcM + dcopy_BcM)
        ctx.stream.gradient = dx
        return dhandle, None, None
