"""Preference losses by name, what each reads, and their coefficients. Imports no tensor library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from longctx.errors import ConfigError


class PreferenceLoss(NamedTuple):
    """What a preference loss reads; ``longctx.objectives.preference_losses`` has its formula."""

    needs_reference: bool
    """Whether it compares with a reference model's log-likelihoods."""
    coefficients: tuple[str, ...] = ()
    """Fields of ``PreferenceOptions`` that it reads besides beta and nll_weight."""
    is_paired: bool = True
    """False for labelled single replies."""


PREFERENCE_LOSSES = {
    "dpo": PreferenceLoss(needs_reference=True),
    "ipo": PreferenceLoss(needs_reference=True),
    "simpo": PreferenceLoss(needs_reference=False, coefficients=("margin",)),
    "orpo": PreferenceLoss(needs_reference=False),
    "kto": PreferenceLoss(True, ("desirable_weight", "undesirable_weight"), is_paired=False),
}
"""Losses that a config can name (``preference.loss``)."""


@dataclass(frozen=True, kw_only=True)
class PreferenceOptions:
    """Preference loss, its reference and its coefficients; read with train.objective=preferences."""

    loss: Literal["dpo", "ipo", "simpo", "orpo", "kto"] = "dpo"
    """Preference loss: dpo, ipo and kto (single labelled replies) compare with a reference's log-likelihoods, which
    `longctx score --references` stores in the shards; simpo and orpo need none."""
    reference: Literal["start", "any"] = "start"
    """Reference model whose log-likelihoods the shards must have: start for the weights of run.start_from with the
    run's rope, any for any model's."""
    beta: float = 0.1
    """Scale of rewards: how strongly dpo, ipo (its τ) and kto hold a model near its reference; for simpo try 2, for
    orpo it weighs the odds ratio."""
    margin: float = 0.5
    """Reward margin between the two replies (simpo's γ)."""
    nll_weight: float = 0.0
    """Weight of the chosen reply's mean negative log-likelihood, added to the loss (RPO: 1)."""
    desirable_weight: float = 1.0
    """Weight of desirable replies (kto)."""
    undesirable_weight: float = 1.0
    """Weight of undesirable replies (kto)."""

    def __post_init__(self) -> None:
        if self.loss not in PREFERENCE_LOSSES:
            raise ConfigError(f"preference.loss={self.loss!r} must be one of {', '.join(PREFERENCE_LOSSES)}.")
        if not 0 < self.beta < float("inf"):
            raise ConfigError(f"preference.beta={self.beta} must be a positive number. Try 0.1.")
        for name in ("margin", "nll_weight", "desirable_weight", "undesirable_weight"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(f"preference.{name}={getattr(self, name)} must be a number of at least 0.")

    @property
    def kind(self) -> PreferenceLoss:
        """What the loss reads."""
        return PREFERENCE_LOSSES[self.loss]
