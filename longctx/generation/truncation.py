"""Take unlikely tokens out of a distribution: top-k, top-p and min-p. Scores [V] to scores [V], −inf where taken out.

Axes: V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor


def top_k(scores_V: Tensor, count: int) -> Tensor:
    """The scores of the ``count`` likeliest tokens, and of those as likely as the last of them."""
    # By score, not by index: ties with the last one stay, whichever of them topk names.
    threshold = scores_V.topk(min(count, len(scores_V))).values[-1]
    return scores_V.masked_fill(scores_V < threshold, -torch.inf)


def top_p(scores_V: Tensor, probability: float) -> Tensor:
    """The scores of the likeliest tokens that reach ``probability`` together; at least one."""
    ascending, order = scores_V.sort()
    # Drop the unlikeliest tokens while the others still reach it; the likeliest always stays.
    dropped = ascending.softmax(0).cumsum(0) <= 1 - probability
    dropped[-1] = False
    return scores_V.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), -torch.inf)


def min_p(scores_V: Tensor, share: float) -> Tensor:
    """The scores of tokens that are at least ``share`` times as likely as the likeliest (arXiv 2407.01082)."""
    # Of probabilities and not of scores: rounding then takes out what transformers takes out.
    probabilities_V = scores_V.softmax(0)
    return scores_V.masked_fill(probabilities_V < share * probabilities_V.max(), -torch.inf)
