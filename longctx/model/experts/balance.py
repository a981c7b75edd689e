"""Load balancing: the balance loss over documents, micro-batches or steps, and the selection bias that needs no loss.

Axes: L expert layers, S documents in the micro-batch, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from longctx.model.experts.router import RouterStats


# Balance loss (Switch Transformer, arXiv 2101.03961 eq. 4). The load, an expert's share of the choices, has no
# gradient, so the loss lowers the probabilities of overloaded experts. Loads cover the full scope, but each rank sums
# its own tokens' probabilities only: so losses add up over ranks and micro-batches, and the scope costs one collective
# for all layers.
def balance_sum(
    stats: Sequence[RouterStats],
    *,
    scope: str,
    reduce_counts: Callable[[Tensor], Tensor],
    load_LE: Tensor | None = None,
) -> Tensor:
    """Sum load · probability over layers, tokens and experts: 1 per token and layer if all loads are equal.

    An expert's load is its share of the choices in the ``scope``, times E, without gradient. Probabilities are this
    rank's, so that sums over all ranks and micro-batches add up to the step's.

    * sequence: choices in the token's own document.
    * micro_batch: choices in all documents of the micro-batch. Both scopes need counts from all ranks that share the
      sequence: ``reduce_counts`` sums [L, S, E] (S = 1 for the latter) over them; it is called once, on every rank.
    * global_batch: choices in the full step, over all ranks and micro-batches. Its own counts are unknown before its
      first backward pass, so ``load_LE`` holds the previous step's loads (``load_share``); None, before the first step,
      means even loads.
    """
    prob_sums_LSE = torch.stack([layer.prob_sums_SE for layer in stats])
    if scope == "global_batch":
        prob_sums_LE = prob_sums_LSE.sum(1)
        if load_LE is None:
            return prob_sums_LE.sum()
        return (load_LE.to(prob_sums_LE) * prob_sums_LE).sum()
    # Loads cover all ranks, probabilities this rank: one collective for all layers.
    counts_LSE = torch.stack([layer.counts_SE for layer in stats])
    if scope == "micro_batch":
        counts_LSE, prob_sums_LSE = counts_LSE.sum(1, keepdim=True), prob_sums_LSE.sum(1, keepdim=True)
    return (load_share(reduce_counts(counts_LSE)).to(prob_sums_LSE) * prob_sums_LSE).sum()


def load_share(counts_E: Tensor) -> Tensor:
    """Compute each expert's share of the choices times E, float64 [..., E]: 1 if all are equal or all are 0."""
    chosen = counts_E.sum(-1, keepdim=True)
    even = torch.ones_like(counts_E, dtype=torch.float64)
    return (counts_E * counts_E.shape[-1] / chosen.double()).where(chosen > 0, even)


@torch.no_grad()
def move_selection_bias_(biases: Sequence[Tensor], counts_LE: Tensor, rate: float) -> None:
    """Make experts that a step underused likelier to be chosen in the next (arXiv 2408.15664), in place.

    ``biases`` holds each layer's [E]. ``counts_LE`` covers the full step, over all ranks and micro-batches, so that all
    ranks make equal moves. A layer's bias moves by ``rate``, up or down with the sign of mean count − count;
    subtracting the mean move changes no choice and keeps the bias from drifting.
    """
    E = counts_LE.shape[1]
    too_few_LE = (counts_LE.sum(1, keepdim=True) - E * counts_LE).sign().double()  # in integers: exact
    moves_LE = rate * (too_few_LE - too_few_LE.mean(1, keepdim=True))
    for bias_E, move_E in zip(biases, moves_LE, strict=True):
        bias_E += move_E.to(bias_E)
