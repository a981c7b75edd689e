"""Which experts a token visits, and what they weigh: pure functions of the router's logits, and the router itself.

Axes: N tokens, M model width, E experts, G groups of experts, C tokens an expert takes, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from longctx.config import ModelConfig
from longctx.kernels.dtypes import accumulate_dtype

NOWHERE = -1
"""Id in place of an expert's where a choice leads to none: no row travels, and its gate is 0."""


class Routing(NamedTuple):
    """Where tokens go, and what they weigh there."""

    experts_Nk: Tensor
    """Ids of each token's experts, the best first, int64; ``NOWHERE`` for none."""
    gates_Nk: Tensor
    """Factors of these experts' outputs, with gradient, in the logits' dtype; 0 for none."""
    probs_NE: Tensor
    """Each expert's share of the token's scores, with gradient: what the balance loss reads."""


def route(
    logits_NE: Tensor, config: ModelConfig, *, bias_E: Tensor | None = None, replay_Nk: Tensor | None = None
) -> Routing:
    """The k best experts of every token by ``config``'s rules, from float32 (or float64) logits.

    ``bias_E`` is added where experts are chosen and not where they are weighed. ``replay_Nk`` are ids chosen before, by
    recomputation's first run or another program; gates and probabilities are those of these logits all the same. Ids
    are in range also where logits are not finite.
    """
    is_softmax = config.score_function == "softmax"
    scores_NE = logits_NE.softmax(-1) if is_softmax else logits_NE.sigmoid()
    experts_Nk = _choose(scores_NE.detach(), config, bias_E) if replay_Nk is None else replay_Nk
    # masked also where nothing can be nowhere: recomputation, which replays, must save the same tensors
    gates_Nk = scores_NE.gather(-1, experts_Nk.clamp(min=0)).masked_fill(experts_Nk < 0, 0)
    if config.normalize_gates:
        gates_Nk = gates_Nk / gates_Nk.sum(-1, keepdim=True).clamp(min=1e-20)
    if config.routed_scale != 1:
        gates_Nk = gates_Nk * config.routed_scale
    probs_NE = scores_NE if is_softmax else scores_NE / scores_NE.sum(-1, keepdim=True).clamp(min=1e-20)
    return Routing(experts_Nk, gates_Nk, probs_NE)


def _choose(scores_NE: Tensor, config: ModelConfig, bias_E: Tensor | None) -> Tensor:
    if bias_E is not None:
        scores_NE = scores_NE + bias_E
    if config.groups_per_token < config.expert_groups:
        best_of = 2 if config.selection_bias else 1
        scores_NE = within_best_groups(scores_NE, config.expert_groups, config.groups_per_token, best_of=best_of)
    return scores_NE.topk(config.experts_per_token, dim=-1).indices


def within_best_groups(scores_NE: Tensor, groups: int, kept: int, *, best_of: int) -> Tensor:
    """Scores with −inf outside of each token's ``kept`` best groups, a group being the sum of its ``best_of`` best."""
    scores_NGe = scores_NE.unflatten(-1, (groups, -1))
    best_NG = scores_NGe.topk(best_of, dim=-1).values.sum(-1)
    inside_NG = torch.zeros_like(best_NG, dtype=torch.bool).scatter_(1, best_NG.topk(kept, dim=-1).indices, True)
    return scores_NGe.masked_fill(~inside_NG.unsqueeze(-1), -torch.inf).flatten(-2)


class Router(nn.Module):
    """The projection to logits, and the bias of the choice; float32 in any model dtype, for rounding flips choices."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        E = config.num_experts
        self.bias: nn.Parameter | None
        self.e_score_correction_bias: Tensor | None
        self.weight = nn.Parameter(torch.empty(E, config.hidden_size))
        self.register_parameter("bias", nn.Parameter(torch.empty(E)) if config.router_bias else None)
        chosen_by = torch.zeros(E) if config.selection_bias else None
        self.register_buffer("e_score_correction_bias", chosen_by)

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Router:
        """As PyTorch's, but the selection bias stays float32 (float64 at least) in any model dtype."""
        before = self._buffers["e_score_correction_bias"]
        super()._apply(fn, recurse)
        after = self._buffers["e_score_correction_bias"]
        if before is not None and after is not None and after.dtype not in (torch.float32, torch.float64):
            self._buffers["e_score_correction_bias"] = before.to(after.device)
        return self

    def forward(self, x_NM: Tensor) -> Tensor:
        """Logits [N, E] in float32 (float64 for float64)."""
        return _Logits.apply(x_NM, self.weight, self.bias)


_CHUNK_VALUES = 1 << 24
"""Values of x that exist in float32 at a time: 64 MB."""


class _Logits(torch.autograd.Function):
    """x·Wᵀ + b in float32. Keeps x as it is, where autograd would keep a float32 copy of it, twice bfloat16's bytes."""

    @staticmethod
    def forward(ctx: Any, x_NM: Tensor, weight_EM: Tensor, bias_E: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NM, weight_EM)
        ctx.bias_dtype = None if bias_E is None else bias_E.dtype
        wide = accumulate_dtype(x_NM.dtype)
        bias, weight = None if bias_E is None else bias_E.to(wide), weight_EM.to(wide)
        return _cat([nn.functional.linear(part.to(wide), weight, bias) for part in _parts(x_NM, wide)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dlogits_NE: Tensor):  # type: ignore[override]
        x_NM, weight_EM = ctx.saved_tensors
        weight = weight_EM.to(dlogits_NE.dtype)
        parts = _parts(x_NM, dlogits_NE.dtype)
        dlogits = dlogits_NE.split([len(part) for part in parts])
        dx_NM = _cat([(d @ weight).to(x_NM.dtype) for d in dlogits])
        dweight_EM = dlogits[0].T @ parts[0].to(dlogits_NE.dtype)
        for d, part in zip(dlogits[1:], parts[1:], strict=True):
            dweight_EM.addmm_(d.T, part.to(d.dtype))
        dbias_E = None if ctx.bias_dtype is None else dlogits_NE.sum(0).to(ctx.bias_dtype)
        return dx_NM, dweight_EM.to(weight_EM.dtype), dbias_E


def _parts(x_NM: Tensor, wide: torch.dtype) -> tuple[Tensor, ...]:
    """Rows that are converted together; all where there is nothing to convert."""
    return (x_NM,) if x_NM.dtype == wide else x_NM.split(max(1, _CHUNK_VALUES // max(1, x_NM.shape[1])))


def _cat(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)


class RouterStats(NamedTuple):
    """What one layer's router did with this rank's tokens, padding left out; adds up over ranks and micro-batches."""

    counts_SE: Tensor
    """Tokens of the document that chose the expert, also those for which it had no room; int64, no gradient."""
    prob_sums_SE: Tensor
    """Sum over the document's tokens of the expert's probability, float32, with gradient."""
    z_sum: Tensor
    """Σ over tokens of logsumexp(logits)², float32 scalar (ST-MoE, arXiv 2202.08906); with gradient if it has a
    weight."""
    facts_4: Tensor
    """Sums over tokens, float64, no gradient: mean squared logit; entropy of the probabilities in nats; choices for
    which an expert had no room; tokens with a logit that is not finite, padding too here: it would spread as well."""


def no_stats(logits_NE: Tensor) -> RouterStats:
    """Of no document."""
    nothing_0E = logits_NE.new_zeros(0, logits_NE.shape[1])
    facts_4 = logits_NE.new_zeros(4, dtype=torch.float64)
    return RouterStats(nothing_0E.long(), nothing_0E, logits_NE.new_zeros(()), facts_4)


def router_stats(
    logits_NE: Tensor,
    routing: Routing,
    chosen_Nk: Tensor,
    documents_N: Tensor,
    num_documents: int,
    *,
    counting: bool = True,
    z_gradient: bool = True,
) -> RouterStats:
    """Statistics of these tokens, of which ``chosen_Nk`` are the choices and ``routing`` is what came of them.

    Padding has a negative document. Without ``counting``, what has no gradient is left at 0.
    """
    probs_NE, E, is_real_N = routing.probs_NE, routing.probs_NE.shape[1], documents_N >= 0
    row_N = documents_N.where(is_real_N, num_documents)  # padding lands in a last row that is cut off
    sums = probs_NE.new_zeros(num_documents + 1, E)
    sums = sums.index_put((row_N,), probs_NE, accumulate=True)  # unlike index_add, in fixed order on every device
    with torch.set_grad_enabled(z_gradient and torch.is_grad_enabled()):
        z_sum = logits_NE.logsumexp(-1).square().masked_fill(~is_real_N, 0).sum()
    counts = chosen_Nk.new_zeros(num_documents + 1, E)
    facts_4 = logits_NE.new_zeros(4, dtype=torch.float64)
    if counting:
        slots = (row_N[:, None] * E + chosen_Nk).where(chosen_Nk >= 0, num_documents * E).flatten()
        counts.view(-1).scatter_add_(0, slots, torch.ones_like(slots))
        facts_4 = _facts(logits_NE.detach(), probs_NE.detach(), chosen_Nk, routing.experts_Nk, is_real_N)
    return RouterStats(counts[:-1], sums[:-1], z_sum, facts_4)


def _facts(logits_NE: Tensor, probs_NE: Tensor, chosen_Nk: Tensor, experts_Nk: Tensor, is_real_N: Tensor) -> Tensor:
    square_N, entropy_N = logits_NE.square().mean(-1), torch.special.entr(probs_NE).sum(-1)
    refused_N = ((chosen_Nk >= 0) & (experts_Nk < 0)).sum(-1)
    sums = [x_N.where(is_real_N, 0).sum(dtype=torch.float64) for x_N in (square_N, entropy_N, refused_N)]
    return torch.stack([*sums, (~logits_NE.isfinite().all(-1)).sum(dtype=torch.float64)])
