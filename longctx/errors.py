"""Errors that a user can cause. Each message states the value, the rule, and the nearest valid alternative.

``launcher`` turns them into one screen of text and an exit code, the same on every rank; ``assert`` is for internal
invariants.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any


class LongCtxError(Exception):
    """Base class for all errors that a user can fix."""


class ConfigError(LongCtxError):
    """Configuration that cannot run: unknown key, wrong type, incompatible sizes."""


class LengthError(ConfigError):
    """A length too short for the shortest prompt in an evaluation task."""


class DataError(LongCtxError):
    """Missing, unreadable or damaged corpus, tokenizer or shard."""


class CheckpointError(LongCtxError):
    """Checkpoint that is missing, incomplete, damaged, from another model, or could not be written."""


class TrainingError(LongCtxError):
    """Training step that cannot be taken, for example because of non-finite values."""

    def __init__(self, message: str, record: Mapping[str, Any] | None = None) -> None:
        """Set the message and the step's ``record`` for the run's metrics."""
        super().__init__(message)
        self.record = record


class GradientError(TrainingError):
    """Gradients that are not finite, or rejected for their norm: the update was skipped on every rank."""

    def __init__(self, norm: float, names: Sequence[str]) -> None:
        """Set ``names``, the parameters with non-finite gradients, in the model's order.

        ``names`` is empty if each gradient is finite and only their total norm is not.
        """
        problem = f"was rejected (its norm is {norm:g})"
        if not math.isfinite(norm):
            problem = f"is not finite (its norm is {norm:g}) in: {', '.join(names) or 'no one tensor'}"
        super().__init__(f"the gradient {problem}")
        self.norm, self.names = norm, list(names)


class ClusterError(LongCtxError):
    """Processes, hosts or launch options that do not fit the run."""
