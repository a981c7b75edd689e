"""What one step leaves: numbers and tensors that two programs are compared by."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from launcher.verification.choices import RouterState


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
    experts_LTk: Tensor | None = None
    """The experts that the run chose for each token of the step, by layer of experts; None in a dense model."""
    routers: tuple[RouterState, ...] = ()
    """One process's routers, micro-batch by micro-batch, when it made the run's choices."""


STEPS = 3


def gradient_of_moments(new: Tensor, old: Tensor | None, beta1: float) -> Tensor:
    """The gradient that made AdamW's first moment ``new`` of ``old`` (None: of nothing)."""
    if old is not None:
        new = new - beta1 * old
    return new / (1 - beta1)
