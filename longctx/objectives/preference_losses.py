"""Preference losses: functions of two replies' log-likelihoods to one prompt.

Axes: P records, 2 replies of each: chosen and rejected, or for KTO a labelled reply and another prompt's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from longctx.preference_options import PreferenceOptions


class ReplyScores(NamedTuple):
    """Both replies of each record, [P, 2] in float64."""

    sums: Tensor
    """Log-likelihoods of the replies' tokens, summed."""
    lengths: Tensor
    """Tokens summed."""
    reference: Tensor
    """Their log-likelihoods under the reference model."""
    is_desirable_P: Tensor
    """Label of each record's first reply, bool; True for pairs."""

    @property
    def ratios(self) -> Tensor:
        """Log of the policy's probability over the reference's."""
        return self.sums - self.reference

    @property
    def means(self) -> Tensor:
        """Mean log-likelihood per token."""
        return self.sums / self.lengths


def _dpo(scores: ReplyScores, options: PreferenceOptions) -> Tensor:
    """Rafailov et al., arXiv 2305.18290, Eq. 7."""
    return -logsigmoid(options.beta * _difference(scores.ratios))


def _ipo(scores: ReplyScores, options: PreferenceOptions) -> Tensor:
    """Azar et al., arXiv 2310.12036, Eq. 17, on means per token, as in its authors' experiments."""
    return (_difference(scores.ratios / scores.lengths) - 1 / (2 * options.beta)) ** 2


def _simpo(scores: ReplyScores, options: PreferenceOptions) -> Tensor:
    """Meng et al., arXiv 2405.14734, Eq. 6."""
    return -logsigmoid(options.beta * _difference(scores.means) - options.margin)


def _orpo(scores: ReplyScores, options: PreferenceOptions) -> Tensor:
    """Hong et al., arXiv 2403.07691, Eq. 6: the chosen reply's mean loss, and the odds ratio of the two."""
    # odds p / (1 − p) of the geometric mean p = exp(mean)
    log_odds = scores.means - torch.log(-torch.expm1(scores.means))
    return -scores.means[:, 0] - options.beta * logsigmoid(_difference(log_odds))


def _kto(scores: ReplyScores, options: PreferenceOptions) -> Tensor:
    """Ethayarajh et al., arXiv 2402.01306, Eq. 7, with the KL estimated from the micro-batch's mismatched replies."""
    reply, mismatched = scores.ratios.unbind(1)
    kl = mismatched.detach().mean().clamp(min=0)
    is_desirable = scores.is_desirable_P.to(reply.dtype)
    weight = is_desirable * options.desirable_weight + (1 - is_desirable) * options.undesirable_weight
    return weight * (1 - torch.sigmoid(options.beta * (2 * is_desirable - 1) * (reply - kl)))


def _difference(values_P2: Tensor) -> Tensor:
    return values_P2[:, 0] - values_P2[:, 1]


LOSSES: dict[str, Callable[[ReplyScores, PreferenceOptions], Tensor]] = {
    "dpo": _dpo,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
    "kto": _kto,
}
"""Each returns the records' losses [P]; ``longctx.preference_options`` says what they read."""


def preference_losses(scores: ReplyScores, options: PreferenceOptions) -> Tensor:
    """Return each record's loss [P], with the chosen reply's likelihood if it is weighted."""
    losses_P = LOSSES[options.loss](scores, options)
    if options.nll_weight:
        losses_P = losses_P - options.nll_weight * scores.means[:, 0]
    return losses_P


def implicit_rewards(scores: ReplyScores, options: PreferenceOptions) -> Tensor:
    """Return the replies' rewards [P, 2]: beta times their log ratio, or mean log-likelihood without a reference."""
    if options.kind.needs_reference:
        return options.beta * scores.ratios
    return options.beta * scores.means
