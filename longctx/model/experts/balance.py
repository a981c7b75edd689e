"""Even loads: the balance loss over documents, micro-batches or steps, and the bias that moves without a loss.

Axes: L expert layers, S documents of the micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longctx.model.experts.router import RouterStats


def balance_sum(
    stats: Sequence[RouterStats],
    *,
    scope: str,
    reduce_counts: Callable[[Tensor], Tensor],
    load_LE: Tensor | None = None,
) -> Tensor:
    """Return Σ load · probability over layers, tokens and experts: 1 per token and layer if all loads are equal.

    An expert's load is its share of the choices in the ``scope``, times E, and has no gradient. Probabilities are those
    of this rank's tokens, so that the sums of all ranks and micro-batches add up to the step's.

    * sequence: in the token's own document.
    * micro_batch: in all documents of the micro-batch. Both need the counts of all ranks that share the sequence:
      ``reduce_counts`` sums [L, S, E] (S = 1 for the latter) over them; called once, on every rank.
    * global_batch: in the full step, over all ranks and micro-batches. Its own counts are not known before its first
      backward pass, so ``load_LE`` are the loads of the step before (``load_share``); None, before the first, is even.
    """
    prob_sums_LSE = torch.stack([layer.prob_sums_SE for layer in stats])
    if scope == "global_batch":
        prob_sums_LE = prob_sums_LSE.sum(1)
        if load_LE is None:
            return prob_sums_LE.sum()
        return (load_LE.to(prob_sums_LE) * prob_sums_LE).sum()
    # loads are those of all ranks, probabilities this rank's own: one collective for all layers
    counts_LSE = torch.stack([layer.counts_SE for layer in stats])
    if scope == "micro_batch":
        counts_LSE, prob_sums_LSE = counts_LSE.sum(1, keepdim=True), prob_sums_LSE.sum(1, keepdim=True)
    return (load_share(reduce_counts(counts_LSE)).to(prob_sums_LSE) * prob_sums_LSE).sum()


def load_share(counts_E: Tensor) -> Tensor:
    """Return each expert's share of the choices times E, float64 [..., E]: 1 if all are equal or there are none."""
    chosen = counts_E.sum(-1, keepdim=True)
    even = torch.ones_like(counts_E, dtype=torch.float64)
    return (counts_E * counts_E.shape[-1] / chosen.double()).where(chosen > 0, even)


@torch.no_grad()
def move_selection_bias_(biases: Sequence[Tensor], counts_LE: Tensor, rate: float) -> None:
    """Make the experts that a step used less likelier to be chosen in the next (arXiv 2408.15664), in place.

    ``biases`` are the layers' [E]. ``counts_LE`` are those of the full step, over all ranks and micro-batches, so that
    all ranks make the same moves. A layer's bias moves by ``rate`` up or down with the sign of mean count − count; the
    mean of these moves is subtracted, which changes no choice and keeps the bias from drifting.
    """
    E = counts_LE.shape[1]
    too_few_LE = (counts_LE.sum(1, keepdim=True) - E * counts_LE).sign().double()  # in integers: exact
    moves_LE = rate * (too_few_LE - too_few_LE.mean(1, keepdim=True))
    for bias_E, move_E in zip(biases, moves_LE, strict=True):
        bias_E += move_E.to(bias_E)
