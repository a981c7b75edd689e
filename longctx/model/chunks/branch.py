"""A second residual stream that starts where another one ends, one token chunk at a time.

Axes: B rows, t tokens of this rank, c tokens in a chunk, M model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.model.chunks.parts import Differentiate, leaves
from longctx.model.chunks.store import Stored, in_turn
from longctx.model.chunks.stream import ResidualStream

Join = Callable[[Tensor, Tensor], Tensor]
"""Computes the branch's first values from the stream's normed values and those that enter beside them."""


def branch_off(
    stream: ResidualStream,
    branch: ResidualStream,
    handle: Tensor,
    entering_BtM: Tensor,
    *,
    norm: nn.Module | None,
    join: Join,
    weights: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:
    """Start a branch after a stream's last layer; return the stream's handle and the branch's.

    ``weights`` are those that ``norm`` and ``join`` read. The stream's handle must go on to a function that gives it a
    gradient.
    """
    return _BranchOff.apply(handle, entering_BtM, _Branch(stream, branch, norm, join), *weights)


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

    def forward(self, entering_BtM: Tensor, *, trains: bool) -> None:
        """Compute the branch's first values."""
        store, chunks, num_tokens = self.stream.store, self.stream.chunks, self.stream.num_tokens
        x = self.stream.take_values()
        # The stream continues with the same values.
        self.stream.values = x
        first: Stored | None = None
        kept: Stored | None = None
        for tokens, (x_BcM,) in in_turn(chunks, [x]):
            first_BcM = self._first(x_BcM, entering_BtM[:, tokens])
            first = first or store.empty_chunks(num_tokens, first_BcM)
            first.write(tokens, first_BcM)
            if trains:
                kept = kept or store.empty_chunks(num_tokens, x_BcM)
                kept.write(tokens, x_BcM)
        self.branch.values = first
        if kept is not None:
            self.kept = [kept, store.put(entering_BtM)]

    def backward(self, differentiate: Differentiate) -> Tensor:
        """Add the branch's share to the stream's gradient; return the entering values' gradient."""
        x, entering = self.kept
        self.kept = []
        dfirst, dx = self.branch.take_gradient(), self.stream.take_gradient()
        dentering: Stored | None = None
        for tokens, (dfirst_BcM, dx_BcM, x_BcM, entering_BcM) in in_turn(self.stream.chunks, [dfirst, dx, x, entering]):
            # Recomputing norm and join costs less than keeping the values that their backward reads.
            with torch.enable_grad():
                inputs = leaves([x_BcM, entering_BcM])
                own_BcM, entering_BcM = differentiate([self._first(inputs[0], inputs[1])], inputs, [dfirst_BcM])
            dx.write(tokens, own_BcM.add_(dx_BcM))
            dentering = dentering or self.stream.store.empty(self.stream.num_tokens, entering_BcM)
            dentering.write(tokens, entering_BcM)
        self.stream.gradient = dx
        assert dentering is not None
        return dentering.whole().wait()

    def _first(self, x_BcM: Tensor, entering_BcM: Tensor) -> Tensor:
        if self.norm is not None:
            x_BcM = self.norm(x_BcM)
        return self.join(x_BcM, entering_BcM)


class _BranchOff(torch.autograd.Function):
    """Autograd function over both handles, so that the head's gradient precedes the branch's in backward."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, entering_BtM: Tensor, branch: _Branch, *weights: Tensor):
        ctx.branch = branch
        # Saved although the branch holds them: autograd detects an in-place write in between.
        ctx.save_for_backward(*weights)
        branch.forward(entering_BtM, trains=any(ctx.needs_input_grad))
        return handle.new_empty(0), handle.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dhandle: Tensor, _: Tensor):  # type: ignore[override]
        weights = list(ctx.saved_tensors)
        trained = [weight for weight in weights if weight.requires_grad]
        differentiate = Differentiate(trained)
        dentering_BtM = ctx.branch.backward(differentiate)
        gradients = dict(zip(map(id, trained), differentiate.sums.results(), strict=True))
        found = [dhandle, dentering_BtM, None]
        found.extend(gradients.get(id(weight)) for weight in weights)
        return tuple(found)
