"""What one step leaves: numbers and tensors that two programs are compared by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class StepState:
    """A step's loss and gradient, and the weights after it."""

    loss: float
    """Negative log-likelihood of a target."""
    grad_norm: float
    """Before clipping."""
    gradients: dict[str, Tensor]
    """Clipped, float32, flat, by the name of the weight."""
    weights: dict[str, Tensor]
    """The optimiser's float32 copies, after the step."""


STEPS = 3


def gradient_of_moments(new: Tensor, old: Tensor | None, beta1: float) -> Tensor:
    """The gradient that made AdamW's first moment ``new`` of ``old`` (None: of nothing)."""
    if old is not None:
        new = new - beta1 * old
    return new / (1 - beta1)
