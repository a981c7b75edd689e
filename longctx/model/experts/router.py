"""Routing: each token's experts and gates as pure functions of logits, the router itself, and its statistics.

Axes: N tokens, M model width, E experts, G expert groups, k experts per token, S documents in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype, as_dtype

NO_EXPERT = -1
"""Id for an assignment without an expert: its token is not sent for it, and its gate is 0."""


class Routing(NamedTuple):
    """Each token's experts and their gates."""

    experts_Nk: Tensor
    """Each token's expert ids, best first, int64; ``NO_EXPERT`` for a missing one."""
    gates_Nk: Tensor
    """Factors on these experts' outputs, with gradient, in the logits' dtype; 0 for a missing one."""
    probs_NE: Tensor
    """Each expert's share of the token's scores, with gradient; the balance loss reads it."""


# Top-k routing, optionally within the best groups (DeepSeek-V2, arXiv 2405.04434; DeepSeek-V3, arXiv 2412.19437
# §2.1.2). Experts are chosen by score + bias and weighed by score alone, so that the bias evens out loads without
# entering the output. Invariant: a forward pass with replayed ids uses the same operators and saves the same tensors as
# the pass that chose them, which activation checkpointing relies on.
def route(
    logits_NE: Tensor, config: ModelConfig, *, bias_E: Tensor | None = None, replay_Nk: Tensor | None = None
) -> Routing:
    """Choose each token's k best experts by ``config``'s rules, from float32 (or float64) logits.

    ``bias_E`` is added to choose experts, not to weigh them. ``replay_Nk`` holds ids chosen before, by recomputation's
    first forward or another program; gates and probabilities still come from these logits. Ids are in range even if
    logits are not finite.
    """
    is_softmax = config.score_function == "softmax"
    if is_softmax:
        scores_NE = logits_NE.softmax(-1)
    else:
        scores_NE = logits_NE.sigmoid()
    # The choice itself has no gradient; the chosen experts' gates have one.
    experts_Nk = replay_Nk
    if experts_Nk is None:
        experts_Nk = _choose(scores_NE.detach(), config, bias_E)
    # With gradients, masked even if every id is an expert: recomputation, which replays, must save the same tensors.
    if replay_Nk is None and not torch.is_grad_enabled():
        gates_Nk = scores_NE.gather(-1, experts_Nk)
    else:
        gates_Nk = scores_NE.gather(-1, experts_Nk.clamp(min=0)).masked_fill(experts_Nk < 0, 0)
    if config.normalize_gates:
        gates_Nk = gates_Nk / gates_Nk.sum(-1, keepdim=True).clamp(min=1e-20)
    if config.routed_scale != 1:
        gates_Nk = gates_Nk * config.routed_scale
    # Sigmoids do not add up to 1, but the balance loss reads shares.
    probs_NE = scores_NE
    if not is_softmax:
        probs_NE = scores_NE / scores_NE.sum(-1, keepdim=True).clamp(min=1e-20)
    return Routing(experts_Nk, gates_Nk, probs_NE)


def _choose(scores_NE: Tensor, config: ModelConfig, bias_E: Tensor | None) -> Tensor:
    """Return the ids of each token's k best experts, best first."""
    if bias_E is not None:
        scores_NE = scores_NE + bias_E
    if config.groups_per_token < config.expert_groups:
        # DeepSeek-V2 rates a group by its best expert; DeepSeek-V3, which has the bias, by its two best.
        best_of = 1
        if config.selection_bias:
            best_of = 2
        scores_NE = within_best_groups(scores_NE, config.expert_groups, config.groups_per_token, best_of=best_of)
    return scores_NE.topk(config.experts_per_token, dim=-1).indices


def within_best_groups(scores_NE: Tensor, groups: int, kept: int, *, best_of: int) -> Tensor:
    """Set scores to −inf outside each token's ``kept`` best groups, rated by the sum of their ``best_of`` best."""
    scores_NGe = scores_NE.unflatten(-1, (groups, -1))
    best_NG = scores_NGe.topk(best_of, dim=-1).values.sum(-1)
    inside_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter_(1, best_NG.topk(kept, dim=-1).indices, True)
    return scores_NGe.masked_fill(~inside_NG.unsqueeze(-1), -torch.inf).flatten(-2)


class Router(nn.Module):
    """Projection to logits, and the selection bias; float32 in any model dtype, because rounding flips choices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E = config.num_experts
        self.bias: nn.Parameter | None = None
        self.e_score_correction_bias: Tensor | None
        self.weight = nn.Parameter(torch.empty(E, config.hidden_size))
        if config.router_bias:
            self.bias = nn.Parameter(torch.empty(E))
        selection_bias_E: Tensor | None = None
        if config.selection_bias:
            selection_bias_E = torch.zeros(E)
        # A buffer, not a parameter: loads move it (``move_selection_bias_``), not a gradient.
        self.register_buffer("e_score_correction_bias", selection_bias_E)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        """Apply ``fn`` like PyTorch, but keep the selection bias in float32 or float64 in any model dtype."""
        before = self._buffers["e_score_correction_bias"]
        super()._apply(fn, recurse)
        after = self._buffers["e_score_correction_bias"]
        # The result of ``fn`` is rounded: move the unrounded value to the new device instead.
        if before is not None and after is not None and after.dtype not in (torch.float32, torch.float64):
            self._buffers["e_score_correction_bias"] = before.to(after.device)
        return self

    def forward(self, x_NM: Tensor) -> Tensor:
        """Compute logits [N, E] in float32 (float64 for float64)."""
        if not torch.is_grad_enabled():
            return _logits(x_NM, self.weight, self.bias)
        return _Logits.apply(x_NM, self.weight, self.bias)


_CHUNK_VALUES = 1 << 24
"""Values of x that exist in float32 at a time: 64 MB."""


class _Logits(torch.autograd.Function):
    """Autograd function for x·Wᵀ + b in float32.

    It saves x unconverted; autograd would save a float32 copy, twice bfloat16's bytes.
    """

    @staticmethod
    def forward(ctx: Any, x_NM: Tensor, weight_EM: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NM, weight_EM)
        ctx.bias_dtype = None
        if bias_E is not None:
            ctx.bias_dtype = bias_E.dtype
        return _logits(x_NM, weight_EM, bias_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_NE: Tensor):  # type: ignore[override]
        x_NM, weight_EM = ctx.saved_tensors
        compute_dtype = dlogits_NE.dtype
        weight = weight_EM.to(compute_dtype)
        chunks = _chunks(x_NM, compute_dtype)
        dlogits = dlogits_NE.split([len(chunk) for chunk in chunks])
        dx_NM = _cat([(d @ weight).to(x_NM.dtype) for d in dlogits])
        # One sum over all tokens: chunks are added in float32.
        dweight_EM = dlogits[0].T @ chunks[0].to(compute_dtype)
        for d, chunk in zip(dlogits[1:], chunks[1:], strict=True):
            dweight_EM.addmm_(d.T, chunk.to(compute_dtype))
        dbias_E = None
        if ctx.bias_dtype is not None:
            dbias_E = dlogits_NE.sum(0).to(ctx.bias_dtype)
        return dx_NM, dweight_EM.to(weight_EM.dtype), dbias_E


def _logits(x_NM: Tensor, weight_EM: Tensor, bias_E: Tensor | None) -> Tensor:
    """Compute x·Wᵀ + b, converting x to float32 chunk by chunk."""
    compute_dtype = accumulate_dtype(x_NM.dtype)
    weight, bias = as_dtype(weight_EM, compute_dtype), bias_E
    if bias is not None:
        bias = as_dtype(bias, compute_dtype)
    return _cat(
        [nn.functional.linear(as_dtype(chunk, compute_dtype), weight, bias) for chunk in _chunks(x_NM, compute_dtype)]
    )


def _chunks(x_NM: Tensor, compute_dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Split tokens into chunks that are converted together; one chunk if there is no conversion."""
    if x_NM.dtype == compute_dtype:
        return (x_NM,)
    return x_NM.split(max(1, _CHUNK_VALUES // max(1, x_NM.shape[1])))


def _cat(chunks: list[Tensor]) -> Tensor:
    """Concatenate the chunks, without a copy if there is only one."""
    if len(chunks) == 1:
        return chunks[0]
    return torch.cat(chunks)


class RouterDiagnostics(NamedTuple):
    """Router statistics for logs, read by no loss: sums over tokens, float64, without gradient.

    Scalars for one layer, or [L] for L layers; they add up over ranks and micro-batches.
    """

    squared_logits: Tensor
    """Σ mean squared logit, without padding."""
    entropy: Tensor
    """Σ entropy of the probabilities in nats, without padding."""
    dropped_assignments: Tensor
    """Choices dropped by experts at capacity, without padding."""
    non_finite_tokens: Tensor
    """Tokens with a non-finite logit, including padding: it would spread as well."""

    @classmethod
    def none(cls, like: Tensor, *shape: int) -> RouterDiagnostics:
        """Return statistics over zero tokens, on the device of ``like``."""
        zeros = like.new_zeros(shape, dtype=torch.float64)
        return cls(zeros, zeros, zeros, zeros)

    @classmethod
    def stack(cls, layers: Sequence[RouterDiagnostics]) -> RouterDiagnostics:
        """Stack each field over layers to [L]."""
        return cls._make(torch.stack(of_layers) for of_layers in zip(*layers, strict=True))


class RouterStats(NamedTuple):
    """One layer's router sums over this rank's tokens, without padding; additive over ranks and micro-batches."""

    counts_SE: Tensor
    """Tokens per document that chose the expert, including dropped ones; int64, no gradient."""
    prob_sums_SE: Tensor
    """The expert's probability summed over the document's tokens, float32, with gradient."""
    z_sum: Tensor
    """Σ logsumexp(logits)² over tokens, float32 scalar (ST-MoE, arXiv 2202.08906); with gradient if it has a weight."""
    diagnostics: RouterDiagnostics

    def tensors(self) -> tuple[Tensor, ...]:
        """Return all fields in a plain tuple, the only kind that ZeRO-3's hooks look into."""
        return (self.counts_SE, self.prob_sums_SE, self.z_sum, *self.diagnostics)

    @classmethod
    def from_tensors(cls, tensors: Sequence[Tensor]) -> RouterStats:
        """Invert ``tensors``."""
        counts_SE, prob_sums_SE, z_sum = tensors[:3]
        return cls(counts_SE, prob_sums_SE, z_sum, RouterDiagnostics._make(tensors[3:]))


def router_stats(
    logits_NE: Tensor,
    routing: Routing,
    chosen_Nk: Tensor,
    documents_N: Tensor,
    num_documents: int,
    *,
    count_tokens: bool = True,
    z_gradient: bool = True,
) -> RouterStats:
    """Compute statistics for these tokens, which chose ``chosen_Nk`` before any choice was dropped.

    Padding has a negative document. Without ``count_tokens``, statistics without a gradient stay 0.
    """
    probs_NE, E = routing.probs_NE, routing.probs_NE.shape[1]
    is_real_N = documents_N >= 0
    document_N = documents_N.where(is_real_N, num_documents)  # padding goes to an extra document that is cut off

    # Unlike index_add, index_put adds in a fixed order on every device.
    prob_sums_SE = probs_NE.new_zeros(num_documents + 1, E)
    prob_sums_SE = prob_sums_SE.index_put((document_N,), probs_NE, accumulate=True)
    with torch.set_grad_enabled(z_gradient and torch.is_grad_enabled()):
        z_sum = logits_NE.logsumexp(-1).square().masked_fill(~is_real_N, 0).sum()

    # Integers, so the order of additions is free; a choice without an expert goes to padding's document.
    counts_SE = chosen_Nk.new_zeros(num_documents + 1, E)
    diagnostics = RouterDiagnostics.none(logits_NE)
    if count_tokens:
        count_Nk = (document_N[:, None] * E + chosen_Nk).where(chosen_Nk >= 0, num_documents * E).flatten()
        counts_SE.view(-1).scatter_add_(0, count_Nk, torch.ones_like(count_Nk))
        is_dropped_Nk = (chosen_Nk >= 0) & (routing.experts_Nk < 0)
        diagnostics = _diagnostics(logits_NE.detach(), probs_NE.detach(), is_dropped_Nk, is_real_N)
    return RouterStats(counts_SE[:-1], prob_sums_SE[:-1], z_sum, diagnostics)


def _diagnostics(logits_NE: Tensor, probs_NE: Tensor, is_dropped_Nk: Tensor, is_real_N: Tensor) -> RouterDiagnostics:
    """Compute the diagnostics for these tokens."""

    def total(values_N: Tensor) -> Tensor:
        return values_N.where(is_real_N, 0).sum(dtype=torch.float64)

    return RouterDiagnostics(
        squared_logits=total(logits_NE.square().mean(-1)),
        entropy=total(torch.special.entr(probs_NE).sum(-1)),
        dropped_assignments=total(is_dropped_Nk.sum(-1)),
        non_finite_tokens=(~logits_NE.isfinite().all(-1)).sum(dtype=torch.float64),
    )
