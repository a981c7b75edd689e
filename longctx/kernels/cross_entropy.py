"""Cross-entropy of a linear head without its logits ever being whole.

Axes: N tokens, n tokens of one chunk, M model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longctx.batch import IGNORED_TARGET
from longctx.kernels.contract import accumulate_dtype


def linear_cross_entropy(
    hidden_NM: Tensor, weight_VM: Tensor, targets_N: Tensor, *, chunk_tokens: int = 1024
) -> Tensor:
    """Σ −log softmax(hidden · weightᵀ)[target] over the targets that count: a float32 scalar (float64 for float64).

    Works through ``chunk_tokens`` tokens at a time and forms the gradients along with the loss, so logits exist once,
    for one chunk, in float32. The weight's gradient is summed over chunks in float32.
    """
    if torch.is_grad_enabled() and (hidden_NM.requires_grad or weight_VM.requires_grad):
        return _LinearCrossEntropy.apply(hidden_NM, weight_VM, targets_N, chunk_tokens)
    return token_nll(hidden_NM, weight_VM, targets_N, chunk_tokens=chunk_tokens).sum()


@torch.no_grad()
def token_nll(hidden_NM: Tensor, weight_VM: Tensor, targets_N: Tensor, *, chunk_tokens: int = 1024) -> Tensor:
    """−log softmax(hidden · weightᵀ)[target] of each token, [N] float32, no gradient; 0 where the target is ignored."""
    nll_N = hidden_NM.new_zeros(len(targets_N), dtype=accumulate_dtype(hidden_NM.dtype))
    for chunk in _chunks(len(targets_N), chunk_tokens):
        nll_N[chunk], _, _ = _chunk_nll(hidden_NM[chunk], weight_VM, targets_N[chunk])
    return nll_N


class _LinearCrossEntropy(torch.autograd.Function):
    """The loss is linear in what comes back to it (one scalar), so its gradients can be formed before backward."""

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        partial = accumulate_dtype(hidden.dtype)
        nll = hidden.new_zeros((), dtype=partial)
        dhidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        dweight = torch.zeros_like(weight, dtype=partial) if ctx.needs_input_grad[1] else None
        for chunk in _chunks(len(targets), chunk_tokens):
            nll_n, logits_nV, lse_n = _chunk_nll(hidden[chunk], weight, targets[chunk])
            nll += nll_n.sum()
            dlogits_nV = _dlogits(logits_nV, lse_n, targets[chunk]).to(hidden.dtype)
            if dhidden is not None:
                torch.mm(dlogits_nV, weight, out=dhidden[chunk])
            if dweight is not None:
                dweight += dlogits_nV.T @ hidden[chunk]
        ctx.save_for_backward(dhidden, dweight)
        ctx.weight_dtype = weight.dtype
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx, dnll: Tensor):  # type: ignore[override]
        dhidden, dweight = ctx.saved_tensors
        if dhidden is not None:
            dhidden = (dhidden * dnll).to(dhidden.dtype)
        if dweight is not None:
            dweight = (dweight * dnll).to(ctx.weight_dtype)
        return dhidden, dweight, None, None


def _chunks(num_tokens: int, chunk_tokens: int) -> Iterator[slice]:
    return (slice(start, start + chunk_tokens) for start in range(0, num_tokens, chunk_tokens))


def _chunk_nll(hidden_nM: Tensor, weight_VM: Tensor, targets_n: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses (0 where ignored), logits and their log-sum-exp of one chunk, in the accumulation dtype."""
    logits_nV = (hidden_nM @ weight_VM.T).to(accumulate_dtype(hidden_nM.dtype))
    lse_n = logits_nV.logsumexp(-1)
    chosen_n = logits_nV.gather(1, targets_n.clamp(min=0)[:, None]).squeeze(1)
    return (lse_n - chosen_n).masked_fill(targets_n == IGNORED_TARGET, 0), logits_nV, lse_n


def _dlogits(logits_nV: Tensor, lse_n: Tensor, targets_n: Tensor) -> Tensor:
    """softmax − one-hot, zero on ignored rows; overwrites the logits."""
    probs = logits_nV.sub_(lse_n[:, None]).exp_()
    probs.scatter_add_(1, targets_n.clamp(min=0)[:, None], probs.new_full((len(targets_n), 1), -1.0))
    return probs.masked_fill_((targets_n == IGNORED_TARGET)[:, None], 0)
