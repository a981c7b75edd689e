"""Penalties for tokens that the text already contains.

Axes: V vocabulary, N distinct tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longctx.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Penalties:
    """Penalties for tokens from the prompt or the continuation; disabled by default."""

    repetition: float = 1.0
    """Divides positive logits and multiplies negative ones, for tokens in the prompt and the continuation."""
    presence: float = 0.0
    """Subtracted from the logits of tokens in the continuation."""
    frequency: float = 0.0
    """Subtracted from a token's logit once per occurrence in the continuation."""

    def __post_init__(self) -> None:
        if not 0 < self.repetition < math.inf:
            raise ConfigError(f"repetition penalty {self.repetition} must be above 0; 1 disables it.")
        for name in ("presence", "frequency"):
            value = getattr(self, name)
            if not math.isfinite(value):
                raise ConfigError(f"{name} penalty {value} must be finite; 0 disables it.")

    def start(self, prompt_ids: Sequence[int]) -> Callable[[Tensor, Sequence[int]], Tensor]:
        """Return a function that applies the penalties to logits [V], given the new tokens so far (not the prompt)."""
        if self == Penalties():
            return lambda logits_V, new_ids: logits_V
        # Once: a prompt may be long, and is the same at each step.
        prompt_N = torch.tensor(prompt_ids, dtype=torch.int64).unique()

        def apply_penalties(logits_V: Tensor, new_ids: Sequence[int]) -> Tensor:
            new_N, counts_N = torch.tensor(new_ids, dtype=torch.int64).unique(return_counts=True)
            seen_N = torch.cat((prompt_N, new_N)).unique()
            # A prompt may hold ids that the head never predicts.
            seen_N = seen_N[seen_N < len(logits_V)]
            logits_V = _scale_logits(logits_V, seen_N.to(logits_V.device), self.repetition)
            # After the repetition penalty, and before any temperature, as in vLLM and SGLang.
            taken_N = self.frequency * counts_N + self.presence
            return logits_V.index_add(0, new_N.to(logits_V.device), -taken_N.to(logits_V))

        return apply_penalties


def _scale_logits(logits_V: Tensor, ids_N: Tensor, penalty: float) -> Tensor:
    """Reduce these tokens' logits by ``penalty``."""
    logits_N = logits_V[ids_N]
    # Dividing a negative logit would make its token more probable.
    return logits_V.index_copy(0, ids_N, torch.where(logits_N < 0, logits_N * penalty, logits_N / penalty))
