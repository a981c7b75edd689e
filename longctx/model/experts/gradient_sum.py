"""Gradients for the experts' weights, summed over expert blocks and tiles.

Axes: e local experts, n assignments in an expert block, I and O one weight's input and output width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.model.experts.experts_call import ExpertWeights, Needs, QuantizedExperts


# With one tile an expert's sum is complete before the next expert starts. It is then rounded to the weight's dtype at
# once, and one float32 buffer serves all experts. If an expert gets a single matmul, it needs no sum at all.
class GradientSum:
    """Gradient for one weight in all experts, summed in float32 (float64 for float64)."""

    def __init__(self, weight: Tensor, *, tiles: int) -> None:
        self._weight, self._sum_dtype = weight, accumulate_dtype(weight.dtype)
        self._rounds_each = tiles == 1 and weight.dtype != self._sum_dtype
        self._total: Tensor | None = None
        self._is_started = [False] * len(weight)
        self._open: tuple[int, Tensor] | None = None
        """The expert with a sum that is not rounded yet, and its buffer."""
        self._alone: int | None = None
        """The expert with its first matmul written directly to its gradient, in the weight's dtype."""

    def add_outer(self, expert: int, dy_nO: Tensor, x_nI: Tensor) -> None:
        """Add dyᵀ · x to an expert's gradient."""
        if self._rounds_each and dy_nO.dtype == self._weight.dtype and not self._is_started[expert]:
            # This matmul rounds its result already: converting it to float32 and back would take as long again.
            torch.mm(dy_nO.T, x_nI, out=self._whole()[expert])
            self._is_started[expert], self._alone = True, expert
            return
        sum_OI, is_first = self._sum_of(expert)
        if dy_nO.dtype != sum_OI.dtype:
            # A bfloat16 matmul is still summed in float32.
            _put(sum_OI, dy_nO.T @ x_nI, is_first)
        elif is_first:
            torch.mm(dy_nO.T, x_nI, out=sum_OI)
        else:
            sum_OI.addmm_(dy_nO.T, x_nI)

    def add_bias(self, expert: int, dy_nO: Tensor) -> None:
        """Add the sum over assignments to an expert's gradient."""
        sum_O, is_first = self._sum_of(expert)
        _put(sum_O, dy_nO.sum(0, dtype=self._sum_dtype), is_first)

    def add(self, of_experts: Tensor) -> None:
        """Add gradients for all experts at once."""
        if self._total is None:
            self._total = of_experts.to(self._total_dtype)
            self._is_started = [True] * len(self._weight)
        else:
            self._total += of_experts

    def result(self) -> Tensor:
        """Return the sum in the weight's dtype; exact zeros for an expert without contributions."""
        self._round_open()
        total = self._whole()
        # Memory that was not written holds garbage.
        for expert, is_started in enumerate(self._is_started):
            if not is_started:
                total[expert].zero_()
        return total.to(self._weight.dtype)

    @property
    def _total_dtype(self) -> torch.dtype:
        if self._rounds_each:
            return self._weight.dtype
        return self._sum_dtype

    def _whole(self) -> Tensor:
        """Return the gradients for all experts; only some may be written so far."""
        if self._total is None:
            self._total = torch.empty(self._weight.shape, dtype=self._total_dtype, device=self._weight.device)
        return self._total

    def _sum_of(self, expert: int) -> tuple[Tensor, bool]:
        """Return an expert's sum so far, and whether it is still empty, so that its memory holds garbage."""
        is_first = not self._is_started[expert]
        self._is_started[expert] = True
        if not self._rounds_each:
            return self._whole()[expert], is_first
        if self._open is None or self._open[0] != expert:
            assert is_first or self._alone == expert, "an expert's blocks must be consecutive"
            buffer = self._round_open()
            if buffer is None:
                buffer = torch.empty(self._weight.shape[1:], dtype=self._sum_dtype, device=self._weight.device)
            if not is_first:
                buffer.copy_(self._whole()[expert])
            self._open = expert, buffer
        return self._open[1], is_first

    def _round_open(self) -> Tensor | None:
        """Round the open expert's sum, and return its float32 buffer for the next one."""
        if self._open is None:
            return None
        expert, buffer = self._open
        self._open = None
        self._whole()[expert].copy_(buffer)
        return buffer


def _put(total: Tensor, part: Tensor, is_first: bool) -> None:
    """Add a partial sum to a sum, or initialize the sum with it."""
    if is_first:
        total.copy_(part)
    else:
        total.add_(part)


class WeightGradients(NamedTuple):
    """Gradient sums for ``ExpertWeights``; None if no gradient is needed."""

    gate_up: GradientSum | None
    down: GradientSum | None
    gate_up_bias: GradientSum | None
    down_bias: GradientSum | None
    gate_up_a: GradientSum | None
    gate_up_b: GradientSum | None
    down_a: GradientSum | None
    down_b: GradientSum | None

    @classmethod
    def start(cls, weights: ExpertWeights, needs: Needs, *, tiles: int) -> WeightGradients:
        """Create empty sums over ``tiles`` tiles."""

        def of(weight: Tensor | QuantizedExperts | None, needed: bool) -> GradientSum | None:
            # A quantized weight is frozen.
            if not needed or not isinstance(weight, Tensor):
                return None
            return GradientSum(weight, tiles=tiles)

        # ``Needs`` starts with x and gates.
        return cls._make(of(weight, needed) for weight, needed in zip(weights, needs[2:], strict=True))

    def results(self) -> list[Tensor | None]:
        """Return the gradients in the same order as ``ExpertWeights``."""
        gradients: list[Tensor | None] = []
        for total in self:
            if total is None:
                gradients.append(None)
            else:
                gradients.append(total.result())
        return gradients
