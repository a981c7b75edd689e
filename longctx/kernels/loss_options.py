"""Options of the loss over logits. Imports no tensor library."""

from __future__ import annotations

from dataclasses import dataclass

from longctx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """Options for computing logits, and for loss terms beyond the negative log-likelihood.

    Logits are softcap · tanh(logit_scale · (hidden · weightᵀ + bias) / softcap), or without a cap logit_scale · (hidden
    · weightᵀ + bias); the bias is optional. A token's objective is (1 − label_smoothing) · nll + label_smoothing · mean
    over the vocabulary of −log p + z_loss · (log Σ exp logits)², with smoothing as in
    ``torch.nn.functional.cross_entropy`` and the z-loss from PaLM (arXiv 2204.02311 §5).
    """

    logit_scale: float = 1.0
    """Scale factor on the logits, before the cap."""
    softcap: float = 0.0
    """Bound on the logits' magnitude (Gemma 2, arXiv 2408.00118 §2); 0 disables it."""
    z_loss: float = 0.0
    """Weight for the squared log-sum-exp."""
    label_smoothing: float = 0.0
    """Share of the target spread evenly over the vocabulary."""

    def __post_init__(self) -> None:
        for name in ("softcap", "z_loss"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ConfigError(
                    f"{name}={getattr(self, name)} must be finite and at least 0. Try 0, which disables it."
                )
        if not 0 <= self.label_smoothing <= 1:
            raise ConfigError(f"label_smoothing={self.label_smoothing} must be between 0 and 1. Try 0.1.")


PLAIN = LossOptions()
