"""What the ways to compute experts have in common: what they are given, what they keep, and sums of gradients.

Axes: S tokens here, k choices a token, n rows of a block, M model width, F FFN width of one expert (gate and up
together: 2F), e experts here; I and O are the input and output width of one weight.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longctx.kernels.dtypes import accumulate_dtype
from longctx.kernels.memory import fresh


class Weights(NamedTuple):
    """Of the experts here: the parameters themselves."""

    gate_up_eFM: Tensor
    down_eMF: Tensor
    gate_up_bias_eF: Tensor | None
    down_bias_eM: Tensor | None


class Tokens(NamedTuple):
    """Tokens at their experts."""

    x_SM: Tensor
    gates_Sk: Tensor
    experts_Sk: Tensor
    """Counted from the first expert here; negative where a choice leads elsewhere, or nowhere."""
    num_rows: int | None
    """Choices that are not negative; None where only the device knows."""


class Needs(NamedTuple):
    """Whose gradients are wanted."""

    x: bool
    gates: bool
    gate_up: bool
    down: bool
    gate_up_bias: bool
    down_bias: bool


class GradientSum:
    """The gradient of one weight of all experts, summed over blocks and tiles in float32 (float64 for float64)."""

    def __init__(self, like: Tensor, *, tiles: int) -> None:
        self.like, self.partial = like, accumulate_dtype(like.dtype)
        self._rounds_each = tiles == 1 and like.dtype != self.partial  # an expert is done before the next one starts
        self._total: Tensor | None = None
        self._begun = [False] * len(like)
        self._open: tuple[int, Tensor] | None = None

    def add_outer(self, expert: int, dy_nO: Tensor, x_nI: Tensor) -> None:
        """Add dyᵀ · x to an expert's."""
        into_OI, is_first = self._of(expert)
        if dy_nO.dtype != into_OI.dtype:
            self._put(into_OI, dy_nO.T @ x_nI, is_first)
        elif is_first:
            torch.mm(dy_nO.T, x_nI, out=into_OI)
        else:
            into_OI.addmm_(dy_nO.T, x_nI)

    def add_rows(self, expert: int, dy_nO: Tensor) -> None:
        """Add the sum of rows to an expert's."""
        into_O, is_first = self._of(expert)
        self._put(into_O, dy_nO.sum(0, dtype=self.partial), is_first)

    def add(self, of_experts: Tensor) -> None:
        """Add to all experts' at once."""
        if self._total is None:
            self._total = of_experts.to(self.like.dtype if self._rounds_each else self.partial)
            self._begun = [True] * len(self.like)
        else:
            self._total += of_experts

    def result(self) -> Tensor:
        """The sum in the weight's dtype; exact zeros for an expert to which nothing was added."""
        self._close()
        total = self._whole()
        for expert, begun in enumerate(self._begun):
            if not begun:
                total[expert].zero_()
        return total.to(self.like.dtype)

    def _whole(self) -> Tensor:
        if self._total is None:
            dtype = self.like.dtype if self._rounds_each else self.partial
            self._total = fresh(self.like.shape, dtype=dtype, device=self.like.device)
        return self._total

    def _of(self, expert: int) -> tuple[Tensor, bool]:
        """An expert's sum so far, and whether it is yet to be begun."""
        is_first = not self._begun[expert]
        self._begun[expert] = True
        if not self._rounds_each:
            return self._whole()[expert], is_first
        if self._open is None or self._open[0] != expert:
            assert is_first
            spare = self._close()
            if spare is None:
                spare = fresh(self.like.shape[1:], dtype=self.partial, device=self.like.device)
            self._open = expert, spare
        return self._open[1], is_first

    def _close(self) -> Tensor | None:
        """Round the expert that is open; its float32 memory is free for the next."""
        if self._open is None:
            return None
        (expert, wide), self._open = self._open, None
        self._whole()[expert].copy_(wide)
        return wide

    @staticmethod
    def _put(into: Tensor, part: Tensor, is_first: bool) -> None:
        if is_first:
            into.copy_(part)
        else:
            into.add_(part)


class WeightSums(NamedTuple):
    """The gradients of ``Weights``; None where they are not needed."""

    gate_up: GradientSum | None
    down: GradientSum | None
    gate_up_bias: GradientSum | None
    down_bias: GradientSum | None

    @classmethod
    def start(cls, weights: Weights, needs: Needs, *, tiles: int) -> WeightSums:
        """Sums of nothing yet, over so many tiles."""
        wanted = zip(weights, needs[2:], strict=True)
        return cls(*(GradientSum(w, tiles=tiles) if w is not None and needed else None for w, needed in wanted))

    def results(self) -> list[Tensor | None]:
        """In the order of ``Weights``."""
        return [None if total is None else total.result() for total in self]


def kept_widths(keep: str, weights: Weights, *, in_blocks: bool) -> tuple[int, ...]:
    """Widths of what a forward pass keeps of every row, in x's dtype, by ``dispatch.RECOMPUTE``.

    Gate and up; gate · activation, but not of blocks, whose backward has all it takes in the cache; x.
    """
    _, M, F = weights.down_eMF.shape
    everything = (2 * F, M) if in_blocks else (2 * F, F, M)
    return {"all": (), "activation": everything[:1], "none": everything}[keep]
