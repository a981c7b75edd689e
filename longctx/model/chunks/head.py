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
from longctx.model.chunks.parts import WeightSums
from longctx.model.chunks.store import in_turn
from longctx.model.chunks.stream import ResidualStream

ComputeLoss = Callable[..., SumsAndGradients]
"""``sums_and_gradients`` of (hidden_NM, targets_N=, wanted=, dweight_VM=, dbias_V=)."""


def chunked_loss_sums(
    stream: ResidualStream,
    norm: nn.Module | None,
    handle: Tensor,
    weight_VM: Tensor,
    bias_V: Tensor | None,
    targets_Bt: Tensor,
    compute: ComputeLoss,
) -> tuple[Tensor, Tensor]:
    """``loss_sums`` of the residual stream behind the last layer, whose last ``norm`` is applied here."""
    head = ChunkedHead(stream, norm, targets_Bt, compute, trains=torch.is_grad_enabled())
    return _HeadLoss.apply(handle, head, weight_VM, bias_V, *head.norm_weights)


class ChunkedHead:
    """The loss of one forward pass, and the gradients of its sum."""

    def __init__(
        self,
        stream: ResidualStream,
        norm: nn.Module | None,
        targets_Bt: Tensor,
        compute: ComputeLoss,
        *,
        trains: bool,
    ) -> None:
        self.stream, self.targets_Bt, self.compute, self.trains = stream, targets_Bt, compute, trains
        self.norm: nn.Module | None = norm
        self.norm_weights: list[Tensor] = []
        if norm is not None:
            self.norm_weights = list(norm.parameters())
        self.norm_sums = WeightSums(self.norm_weights)
        self.dweight_VM: Tensor | None = None
        self.dbias_V: Tensor | None = None

    def forward(self, weight_VM: Tensor) -> Tensor:
        """Both sums [2] in float64. The gradient takes the place of the residual stream."""
        stream, wanted = self.stream, (self.trains, self.trains and weight_VM.requires_grad)
        sums = torch.zeros(2, dtype=torch.float64, device=weight_VM.device)
        x = stream.take_values()
        for tokens, (x_BcM,) in in_turn(stream.chunks, [x]):
            with torch.set_grad_enabled(self.trains):
                x_BcM = x_BcM.detach().requires_grad_(self.trains)
                hidden_BcM = self._hidden(x_BcM)
            computed = self.compute(
                hidden_BcM.detach().flatten(0, 1),
                targets_N=self.targets_Bt[:, tokens].flatten(),
                wanted=wanted,
                dweight_VM=self.dweight_VM,
                dbias_V=self.dbias_V,
            )
            sums += computed.sums
            self.dweight_VM, self.dbias_V = computed.dweight_VM, computed.dbias_V
            if computed.dhidden_NM is not None:
                x.write(tokens, self._through_norm(x_BcM, hidden_BcM, computed.dhidden_NM.view_as(hidden_BcM)))
        if self.trains:
            stream.gradient = x
        return sums

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the gradient of the residual stream."""
        dx = self.stream.take_gradient()
        for tokens, (dx_BcM,) in in_turn(self.stream.chunks, [dx]):
            dx.write(tokens, (dx_BcM * factor).to(dx_BcM.dtype))
        self.stream.gradient = dx

    def _hidden(self, x_BcM: Tensor) -> Tensor:
        if self.norm is None:
            return x_BcM
        return self.norm(x_BcM)

    def _through_norm(self, x_BcM: Tensor, hidden_BcM: Tensor, dhidden_BcM: Tensor) -> Tensor:
        if self.norm is None:
            return dhidden_BcM
        inputs = [x_BcM]
        inputs.extend(self.norm_weights)
        found = torch.autograd.grad(hidden_BcM, inputs, dhidden_BcM)
        self.norm_sums.add(found[1:])
        return found[0]


class _HeadLoss(torch.autograd.Function):
    """Forward computes the gradients along with the loss, as ``loss_sums`` does; backward brings their factor."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, head: ChunkedHead, weight_VM: Tensor, bias_V: Tensor | None, *norm_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        sums = as_scalars(head.forward(weight_VM), handle.dtype)
        ctx.head, ctx.weight_dtype = head, weight_VM.dtype
        ctx.save_for_backward(head.dweight_VM, head.dbias_V, *head.norm_sums.results())
        # Held by the graph alone, which lets go of it before the layers' backward: it may be the largest tensor of all.
        head.dweight_VM = None
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dobjective: Tensor, _: Tensor):  # type: ignore[override]
        dweight_VM, dbias_V, *dnorm = ctx.saved_tensors
        ctx.head.scale_gradient(dobjective)
        if dweight_VM is not None:
            dweight_VM = scaled(dweight_VM, dobjective, ctx.weight_dtype)
        if dbias_V is not None:
            dbias_V = (dbias_V * dobjective).to(ctx.weight_dtype)
        of_norm = [(gradient * dobjective).to(gradient.dtype) for gradient in dnorm]
        return dobjective.new_empty(0, dtype=ctx.weight_dtype), None, dweight_VM, dbias_V, *of_norm
