"""The final norm, the head and the loss, a chunk of tokens at a time: hidden states are never whole.

Axes: B rows, t tokens of this rank, c of a chunk, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.kernels.cross_entropy import SumsAndGradients, as_scalars, scaled
from longctx.model.chunks.store import in_turn
from longctx.model.chunks.stream import ChunkedPass
from longctx.model.chunks.weight_sums import WeightSums

ComputeLoss = Callable[..., SumsAndGradients]
"""``sums_and_gradients`` of (hidden_NM, targets_N, wanted=, dweight_VM=)."""


def chunked_loss_sums(
    handle: Tensor,
    chunked: ChunkedPass,
    norm: nn.Module | None,
    weight_VM: Tensor,
    targets_Bt: Tensor,
    compute: ComputeLoss,
) -> tuple[Tensor, Tensor]:
    """``loss_sums`` of the residual stream behind the last layer."""
    norm_weights: list[nn.Parameter] = []
    if norm is not None:
        norm_weights = list(norm.parameters())
    head = _Head(chunked, norm, targets_Bt, compute)
    return _HeadLoss.apply(handle, head, torch.is_grad_enabled(), weight_VM, *norm_weights)


class _Head:
    """What the head reads."""

    def __init__(self, chunked: ChunkedPass, norm: nn.Module | None, targets_Bt: Tensor, compute: ComputeLoss) -> None:
        self.chunked, self.norm, self.targets_Bt, self.compute = chunked, norm, targets_Bt, compute

    def hidden(self, x_BcM: Tensor) -> Tensor:
        if self.norm is None:
            return x_BcM
        return self.norm(x_BcM)


class _HeadLoss(torch.autograd.Function):
    """Forward computes the gradients along with the loss, as ``loss_sums`` does; backward brings their factor."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, head: _Head, trains: bool, weight_VM: Tensor, *norm_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        chunked, wanted = head.chunked, (trains, trains and weight_VM.requires_grad)
        x = dx = chunked.take_values()
        norm_sums, dweight_VM = WeightSums(norm_weights), None
        sums = torch.zeros(2, dtype=torch.float64, device=weight_VM.device)
        for tokens, (x_BcM,) in in_turn(chunked.chunks, x):
            with torch.set_grad_enabled(trains):
                x_BcM = x_BcM.detach().requires_grad_(trains)
                hidden_BcM = head.hidden(x_BcM)
            targets_N = head.targets_Bt[:, tokens].flatten()
            computed = head.compute(
                hidden_BcM.detach().flatten(0, 1), targets_N=targets_N, wanted=wanted, dweight_VM=dweight_VM
            )
            dweight_VM = computed.dweight_VM
            sums += computed.sums
            if computed.dhidden_NM is None:
                continue
            dx_BcM, *dnorm = torch.autograd.grad(
                hidden_BcM, [x_BcM, *norm_weights], computed.dhidden_NM.view_as(hidden_BcM)
            )
            norm_sums.add(dnorm)
            # In the place of what no one reads any more.
            dx.write(tokens, dx_BcM)
        if trains:
            ctx.chunked, ctx.weight_dtype = chunked, weight_VM.dtype
            chunked.gradient = dx
            ctx.save_for_backward(dweight_VM, *norm_sums.results())
        scalars = as_scalars(sums, x_BcM.dtype)
        ctx.mark_non_differentiable(scalars[1])
        return scalars

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dobjective: Tensor, _: Tensor):  # type: ignore[override]
        dweight_VM, *dnorm = ctx.saved_tensors
        dx = ctx.chunked.gradient
        for tokens, (dx_BcM,) in in_turn(ctx.chunked.chunks, dx):
            dx.write(tokens, (dx_BcM * dobjective).to(dx_BcM.dtype))
        if dweight_VM is not None:
            dweight_VM = scaled(dweight_VM, dobjective, ctx.weight_dtype)
        scaled_norm = [(gradient * dobjective).to(gradient.dtype) for gradient in dnorm]
        return dobjective.new_empty(0, dtype=dx_BcM.dtype), None, None, dweight_VM, *scaled_norm
