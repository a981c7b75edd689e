"""Gradients of a layer's weights, summed over chunks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype


class WeightSums:
    """The gradients of some weights, summed in float32 (float64 for float64) and rounded once."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._weights = weights
        self._sums: list[Tensor | None] = [None] * len(weights)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add what one chunk gives to each weight; None for those that it does not meet. The tensors are taken over."""
        for n, gradient in enumerate(gradients):
            if gradient is None:
                continue
            total = self._sums[n]
            if total is None:
                self._sums[n] = gradient.to(accumulate_dtype(gradient.dtype))
            else:
                total += gradient

    def results(self) -> list[Tensor | None]:
        """The gradients in the dtypes of the weights; None for a weight to which nothing was added."""
        results = []
        for weight, total in zip(self._weights, self._sums, strict=True):
            if total is not None:
                total = total.to(weight.dtype)
            results.append(total)
        self._sums.clear()
        return results
