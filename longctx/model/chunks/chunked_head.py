"""Last norm, head and loss, one token chunk at a time, without all hidden states at once.

Axes: B rows, t tokens of this rank, c tokens in a chunk, M model width, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.kernels.cross_entropy import as_scalars, scaled
from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.chunks.chunk_store import Stored, in_turn
from longctx.model.chunks.layer_parts import ChunkBackward
from longctx.model.chunks.residual_stream import ResidualStream
from longctx.model.chunks.token_table import gradient_by_rows, is_summed_by_rows
from longctx.model.head import HeadCalls


def chunked_loss_sums(
    stream: ResidualStream,
    norm: nn.Module | None,
    handle: Tensor,
    weight_VM: Tensor,
    bias_V: Tensor | None,
    targets_Bt: Tensor,
    weights_Bt: Tensor | None,
    calls: HeadCalls,
) -> tuple[Tensor, Tensor]:
    """Compute ``loss_sums`` for the residual stream after the last layer; its last ``norm`` is applied here."""
    head = ChunkedHead(stream, norm, targets_Bt, calls, weights_Bt, needs_grad=torch.is_grad_enabled())
    return _HeadLoss.apply(handle, head, weight_VM, bias_V, *head.norm_weights)


@torch.no_grad()
def chunked_token_nll(
    stream: ResidualStream,
    norm: nn.Module | None,
    handle: Tensor,
    weight_VM: Tensor,
    bias_V: Tensor | None,
    targets_Bt: Tensor,
    weights_Bt: Tensor | None,
    calls: HeadCalls,
) -> Tensor:
    """Compute ``token_nll`` [B, t], without weights, as ``chunked_loss_sums`` would; the stream keeps its values."""
    nll_Bt = handle.new_zeros(targets_Bt.shape, dtype=accumulate_dtype(handle.dtype))
    x = stream.take_values()
    stream.values = x
    for tokens, (x_BcM,) in in_turn(stream.chunks, [x]):
        hidden_BcM = x_BcM if norm is None else norm(x_BcM)
        targets_Bc = targets_Bt[:, tokens]
        nll_Bt[:, tokens] = calls.nll(hidden_BcM.flatten(0, 1), targets_N=targets_Bc.flatten()).view_as(targets_Bc)
    return nll_Bt


class ChunkedHead:
    """One forward pass's loss, and the gradients of its sum."""

    def __init__(
        self,
        stream: ResidualStream,
        norm: nn.Module | None,
        targets_Bt: Tensor,
        calls: HeadCalls,
        weights_Bt: Tensor | None = None,
        *,
        needs_grad: bool,
    ) -> None:
        self.stream, self.targets_Bt, self.calls, self.needs_grad = stream, targets_Bt, calls, needs_grad
        self.weights_Bt = weights_Bt
        self.norm: nn.Module | None = norm
        self.norm_weights: list[Tensor] = []
        if norm is not None:
            self.norm_weights = list(norm.parameters())
        self.norm_backward = ChunkBackward(self.norm_weights)
        self.dweight_VM: Tensor | None = None
        self.dbias_V: Tensor | None = None
        self.hidden: Stored | None = None
        """The head's inputs, if backward sums the weight's gradient by rows."""
        self.softmax: list[Tensor] = []
        """One per chunk, for the same case."""

    def forward(self, weight_VM: Tensor, bias_V: Tensor | None) -> Tensor:
        """Compute both sums [2] in float64. The gradient replaces the residual stream."""
        stream, weight_needs_grad = self.stream, self.needs_grad and weight_VM.requires_grad
        # A sum over all rows may be a run's largest tensor; summing some rows at a time needs their logits twice.
        by_rows = weight_needs_grad and bias_V is None and is_summed_by_rows(weight_VM.numel())
        wanted = (self.needs_grad, weight_needs_grad and not by_rows)
        sums = torch.zeros(2, dtype=torch.float64, device=weight_VM.device)
        x = stream.take_values()
        for tokens, (x_BcM,) in in_turn(stream.chunks, [x]):
            with torch.set_grad_enabled(self.needs_grad):
                x_BcM = x_BcM.detach().requires_grad_(self.needs_grad)
                hidden_BcM = self._hidden(x_BcM)
            # Detached: the loss computes its gradients itself, and the norm's graph waits for them.
            computed = self.calls.loss(
                hidden_BcM.detach().flatten(0, 1),
                targets_N=self.targets_Bt[:, tokens].flatten(),
                weights_N=self._weights(tokens),
                wanted=wanted,
                dweight_VM=self.dweight_VM,
                dbias_V=self.dbias_V,
                with_softmax=by_rows,
            )
            sums += computed.sums
            if computed.softmax_2N is not None:
                self.softmax.append(computed.softmax_2N)
                self.hidden = self.hidden or stream.store.empty_chunks(stream.num_tokens, hidden_BcM)
                self.hidden.write(tokens, hidden_BcM.detach())
            self.dweight_VM, self.dbias_V = computed.dweight_VM, computed.dbias_V
            if computed.dhidden_NM is not None:
                x.write(tokens, self._through_norm(x_BcM, hidden_BcM, computed.dhidden_NM.view_as(hidden_BcM)))
        if self.needs_grad:
            stream.gradient = x
        return sums

    def gradient_by_rows(self, weight_VM: Tensor, factor: Tensor) -> Tensor | None:
        """Compute the weight's gradient times ``factor``, by row blocks; return None if forward has summed it."""
        if self.hidden is None:
            return None
        hidden, self.hidden = self.hidden, None
        softmax, self.softmax = self.softmax, []

        def sum_of(rows: slice) -> Tensor:
            total_vM: Tensor | None = None
            for softmax_2N, (tokens, (hidden_BcM,)) in zip(softmax, in_turn(self.stream.chunks, [hidden]), strict=True):
                hidden_NM, targets_N = hidden_BcM.flatten(0, 1), self.targets_Bt[:, tokens].flatten()
                total_vM = self.calls.gradient(
                    hidden_NM,
                    weight_VM[rows],
                    targets_N,
                    softmax_2N,
                    rows,
                    len(weight_VM),
                    dweight_vM=total_vM,
                    weights_N=self._weights(tokens),
                )
            assert total_vM is not None
            return total_vM.mul_(factor)

        return gradient_by_rows(weight_VM, sum_of)

    def scale_gradient(self, factor: Tensor) -> None:
        """Multiply the residual stream's gradient by ``factor``."""
        dx = self.stream.take_gradient()
        for tokens, (dx_BcM,) in in_turn(self.stream.chunks, [dx]):
            dx.write(tokens, (dx_BcM * factor).to(dx_BcM.dtype))
        self.stream.gradient = dx

    def _weights(self, tokens: slice) -> Tensor | None:
        if self.weights_Bt is None:
            return None
        return self.weights_Bt[:, tokens].flatten()

    def _hidden(self, x_BcM: Tensor) -> Tensor:
        if self.norm is None:
            return x_BcM
        return self.norm(x_BcM)

    def _through_norm(self, x_BcM: Tensor, hidden_BcM: Tensor, dhidden_BcM: Tensor) -> Tensor:
        if self.norm is None:
            return dhidden_BcM
        (dx_BcM,) = self.norm_backward([hidden_BcM], [x_BcM], [dhidden_BcM])
        return dx_BcM


class _HeadLoss(torch.autograd.Function):
    """Autograd function for the loss: forward also computes gradients, as in ``loss_sums``; backward scales them."""

    @staticmethod
    def forward(
        ctx: Any, handle: Tensor, head: ChunkedHead, weight_VM: Tensor, bias_V: Tensor | None, *norm_weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        sums = as_scalars(head.forward(weight_VM, bias_V), handle.dtype)
        ctx.head, ctx.weight_dtype = head, weight_VM.dtype
        by_rows = None if head.hidden is None else weight_VM
        ctx.save_for_backward(by_rows, head.dweight_VM, head.dbias_V, *head.norm_backward.results())
        # Only the graph holds it, and releases it before the layers' backward: it may be the largest tensor of all.
        head.dweight_VM = None
        ctx.mark_non_differentiable(sums[1])
        return sums

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dobjective: Tensor, _: Tensor):  # type: ignore[override]
        weight_VM, dweight_VM, dbias_V, *dnorm = ctx.saved_tensors
        ctx.head.scale_gradient(dobjective)
        if weight_VM is not None:
            dweight_VM = ctx.head.gradient_by_rows(weight_VM, dobjective)
        elif dweight_VM is not None:
            dweight_VM = scaled(dweight_VM, dobjective, ctx.weight_dtype)
        if dbias_V is not None:
            dbias_V = (dbias_V * dobjective).to(ctx.weight_dtype)
        of_norm = [None if gradient is None else (gradient * dobjective).to(gradient.dtype) for gradient in dnorm]
        return dobjective.new_empty(0, dtype=ctx.weight_dtype), None, dweight_VM, dbias_V, *of_norm
