"""Next-token choice: greedy, or sampled with temperature, top-k, top-p and min-p.

Axes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.errors import ConfigError


@dataclass(frozen=True)
class Greedy:
    """Greedy choice of the most probable token, with ties broken by the lowest id."""

    def start(self) -> Callable[[Tensor], int]:
        """Return a function from the next token's logits [V], fp32, to its id."""
        return lambda logits_V: int(logits_V.argmax())


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling from the model's distribution; the same seed samples the same tokens.

    Temperature first, then top-k, then top-p, then min-p, as in Hugging Face.
    """

    temperature: float = 1.0
    """Divides the logits: below 1 sharper, above 1 flatter."""
    top_k: int = 0
    """Keep this many most probable tokens (and ties with the last one); 0 keeps all."""
    top_p: float = 1.0
    """Keep the most probable tokens that together reach this probability; at least one."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the most probable one; 0 keeps all."""
    seed: int = 0
    """Seed of the generator."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ConfigError(f"temperature={self.temperature} must be above 0. For the likeliest token use Greedy().")
        if self.top_k < 0:
            raise ConfigError(f"top_k={self.top_k} must not be negative; 0 keeps every token.")
        if not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={self.top_p} must be in (0, 1]; 1 keeps every token.")
        if not 0 <= self.min_p <= 1:
            raise ConfigError(f"min_p={self.min_p} must be in [0, 1]; 0 keeps every token.")

    def start(self) -> Callable[[Tensor], int]:
        """Return a function from the next token's logits [V], fp32, to its id; it owns a generator on the CPU."""
        generator = torch.Generator().manual_seed(self.seed)

        def draw(logits_V: Tensor) -> int:
            # On the CPU for every device, so that the same seed samples the same tokens.
            return int(torch.multinomial(self.probabilities(logits_V.cpu()), 1, generator=generator))

        return draw

    def probabilities(self, logits_V: Tensor) -> Tensor:
        """Return the sampling distribution [V]."""
        scores_V = logits_V / self.temperature
        if self.top_k:
            scores_V = _top_k(scores_V, self.top_k)
        if self.top_p < 1:
            scores_V = _top_p(scores_V, self.top_p)
        if self.min_p:
            scores_V = _min_p(scores_V, self.min_p)
        return scores_V.softmax(0)


# --- scores [V] to scores [V], −inf for removed tokens ---


def _top_k(scores_V: Tensor, count: int) -> Tensor:
    """Keep scores for the ``count`` most probable tokens, and for tokens that tie with the last of them."""
    # By score, not by index: ties with the last one stay, whichever of them topk returns.
    threshold = scores_V.topk(min(count, len(scores_V))).values[-1]
    return scores_V.masked_fill(scores_V < threshold, -torch.inf)


def _top_p(scores_V: Tensor, probability: float) -> Tensor:
    """Keep scores for the most probable tokens that reach ``probability`` together; at least one."""
    ascending, order = scores_V.sort()
    # Drop the least probable tokens while the others still reach it; the most probable one always stays.
    dropped = ascending.softmax(0).cumsum(0) <= 1 - probability
    dropped[-1] = False
    return scores_V.masked_fill(torch.zeros_like(dropped).scatter(0, order, dropped), -torch.inf)


def _min_p(scores_V: Tensor, share: float) -> Tensor:
    """Keep scores for tokens at least ``share`` times as probable as the most probable one (arXiv 2407.01082)."""
    # From probabilities, not scores, so that rounding removes the same tokens as in transformers.
    probabilities_V = scores_V.softmax(0)
    return scores_V.masked_fill(probabilities_V < share * probabilities_V.max(), -torch.inf)
