"""The errors a user can cause. Each message says the value, the rule, and the nearest thing that works.

``launcher`` turns any of them into one screen of text and an exit code, the same on every rank; ``assert`` stays for
our own invariants.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any


class LongCtxError(Exception):
    """Base of every error that is the user's to mend."""


class ConfigError(LongCtxError):
    """A configuration that cannot run: unknown key, wrong type, sizes that do not fit one another."""


class DataError(LongCtxError):
    """A corpus, tokenizer or shard that is missing, unreadable or damaged."""


class CheckpointError(LongCtxError):
    """A checkpoint that is missing, incomplete, damaged or of another model; or one that could not be written."""


class TrainingError(LongCtxError):
    """A step that cannot be taken: numbers that are no numbers any more."""

    def __init__(self, message: str, record: Mapping[str, Any] | None = None) -> None:
        """``record`` is what the run's metrics shall hold of the step."""
        super().__init__(message)
        self.record = record


class GradientError(TrainingError):
    """Gradients that are not finite, or refused for their norm: the update was left out on every rank."""

    def __init__(self, norm: float, names: Sequence[str]) -> None:
        """``names`` are the parameters whose gradients are not finite, in the model's order; none where each gradient
        is finite and only the norm of them all is not."""
        problem = f"was refused (its norm is {norm:g})"
        if not math.isfinite(norm):
            problem = f"is not finite (its norm is {norm:g}) in: {', '.join(names) or 'no one tensor'}"
        super().__init__(f"the gradient {problem}")
        self.norm, self.names = norm, list(names)


class ClusterError(LongCtxError):
    """Processes, hosts or launch options that do not fit the run."""
