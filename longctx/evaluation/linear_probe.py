"""Linear probe: multinomial logistic regression on a frozen model's features (Image GPT, Chen et al., 2020, §2.3).

The loss is the mean cross-entropy plus λ/2 · Σ weight², which is convex, so L-BFGS finds its minimum from zero weights
in any run. The bias has no penalty: standardized features have mean 0, so it takes the classes' frequencies.

Axes: N images, M features, C classes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

WEIGHT_PENALTY = 1e-3
"""λ. Without it, the weights of separable classes would grow without end."""
_LEAST_SPREAD = 1e-6
"""Standard deviation relative to the mean below which a feature is constant up to rounding."""
_MOST_STEPS, _HISTORY = 1000, 20


@dataclass(frozen=True, eq=False)
class LinearProbe:
    """Fitted classifier of features, in float64."""

    weight_CM: Tensor
    bias_C: Tensor
    mean_M: Tensor
    scale_M: Tensor

    def logits(self, features_NM: Tensor) -> Tensor:
        """Compute logits [N, C]."""
        standardized_NM = (features_NM.double() - self.mean_M) / self.scale_M
        return functional.linear(standardized_NM, self.weight_CM, self.bias_C)

    def accuracy(self, features_NM: Tensor, labels_N: Tensor) -> float:
        """Return the share of correct predictions."""
        return float((self.logits(features_NM).argmax(1) == labels_N).double().mean())


@torch.enable_grad()
def fit_probe(
    features_NM: Tensor, labels_N: Tensor, num_classes: int, *, penalty: float = WEIGHT_PENALTY
) -> LinearProbe:
    """Fit a classifier to features, on their device."""
    features_NM = features_NM.double()
    mean_M, spread_M = features_NM.mean(0), features_NM.std(0, correction=0)
    # Standardizing a constant feature would turn its rounding into a signal.
    scale_M = spread_M.where(spread_M > _LEAST_SPREAD * mean_M.abs(), 1.0)
    probe = LinearProbe(
        weight_CM=features_NM.new_zeros(num_classes, features_NM.shape[1]).requires_grad_(),
        bias_C=features_NM.new_zeros(num_classes).requires_grad_(),
        mean_M=mean_M,
        scale_M=scale_M,
    )
    optimizer = torch.optim.LBFGS(
        [probe.weight_CM, probe.bias_C],
        max_iter=_MOST_STEPS,
        tolerance_grad=1e-7,
        tolerance_change=1e-12,
        history_size=_HISTORY,
        line_search_fn="strong_wolfe",
    )
    standardized_NM = (features_NM - mean_M) / scale_M

    def loss() -> Tensor:
        optimizer.zero_grad()
        logits_NC = functional.linear(standardized_NM, probe.weight_CM, probe.bias_C)
        total = functional.cross_entropy(logits_NC, labels_N) + penalty / 2 * probe.weight_CM.square().sum()
        total.backward()
        return total

    optimizer.step(loss)  # pyright: ignore[reportArgumentType]
    return LinearProbe(probe.weight_CM.detach(), probe.bias_C.detach(), mean_M, scale_M)
