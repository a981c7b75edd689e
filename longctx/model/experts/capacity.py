"""The most tokens of a row that one expert takes; the later ones pass by it.

Axes: N tokens of this process, P those of all processes that share the sequence, T of the whole micro-batch, E experts,
k experts a token, R = T·k choices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from longctx.config import ModelConfig
from longctx.model.experts.router import NOWHERE


@dataclass(frozen=True, eq=False)
class Capacity:
    """What the experts of a layer take of each row of the micro-batch."""

    tokens: int
    """Tokens of one row that an expert takes."""
    num_experts: int
    row_tokens: int
    """Tokens of a row."""
    num_rows: int
    """Rows of the micro-batch, on however many processes."""
    place_N: Tensor
    """Where each of this process's tokens stands in the micro-batch, row after row, int64; negative for padding."""

    @classmethod
    def build(cls, config: ModelConfig, place_N: Tensor, row_tokens: int, num_tokens: int) -> Capacity:
        """That of ``config`` for a micro-batch of so many tokens in rows of that length."""
        assert num_tokens % row_tokens == 0
        return cls(capacity_of(config, row_tokens), config.num_experts, row_tokens, num_tokens // row_tokens, place_N)

    def admit(self, experts_Nk: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """The ids, with ``NOWHERE`` where the expert is full; padding goes nowhere and fills nothing.

        An expert takes a row's tokens in the order in which they stand there, so it matters what the other processes'
        tokens chose and not who holds them; ``gather`` brings the rows of all that share the sequence. Collective.
        """
        T, k = self.row_tokens * self.num_rows, experts_Nk.shape[1]
        everyone_PX = gather(torch.cat((self.place_N[:, None], experts_Nk), dim=1).int()).long()
        place_P, experts_Pk = everyone_PX[:, 0], everyone_PX[:, 1:]
        chosen_Tk = experts_Nk.new_full((T + 1, k), NOWHERE)
        chosen_Tk[_or_last(place_P, T)] = experts_Pk  # padding lands in a last row
        has_room_Tk = self._earlier(chosen_Tk[:T]) < self.tokens
        has_room_Tk = torch.cat((has_room_Tk, has_room_Tk.new_zeros(1, k)))
        return experts_Nk.where(has_room_Tk[_or_last(self.place_N, T)], NOWHERE)

    def _earlier(self, chosen_Tk: Tensor) -> Tensor:
        """For every choice, how many tokens before it in its row made the same."""
        T, k = chosen_Tk.shape
        row_T = torch.arange(T, device=chosen_Tk.device) // self.row_tokens
        pile_R = (row_T[:, None] * (self.num_experts + 1) + chosen_Tk + 1).flatten()  # nowhere is a pile too
        order_R = pile_R.argsort(stable=True)
        heights = pile_R.new_zeros(self.num_rows * (self.num_experts + 1))
        heights.scatter_add_(0, pile_R, torch.ones_like(pile_R))
        below_R = torch.empty_like(pile_R)
        below_R[order_R] = torch.arange(T * k, device=pile_R.device)
        return (below_R - (heights.cumsum(0) - heights)[pile_R]).view(T, k)


def capacity_of(config: ModelConfig, row_tokens: int) -> int:
    """Tokens of a row that one expert takes: ``capacity_factor`` times the mean load of its experts, rounded up."""
    mean_load = Fraction(config.experts_per_token * row_tokens, config.num_experts)
    # the factor as it was written: the nearest binary number to 1.1, ten times, is more than 11 and would round to 12
    return max(1, math.ceil(Fraction(str(config.capacity_factor)) * mean_load))


def _or_last(place_N: Tensor, last: int) -> Tensor:
    return place_N.where(place_N >= 0, last)
