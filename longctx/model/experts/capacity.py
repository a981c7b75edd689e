"""The most tokens of a row that one expert takes; later ones are dropped.

Axes: N tokens of this process, P those of all processes that share the sequence, T of the full micro-batch, E experts,
k experts a token, R = T·k assignments.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from longctx.config import ModelConfig
from longctx.model.experts.router import NO_EXPERT


@dataclass(frozen=True, eq=False)
class Capacity:
    """Limit on the tokens that each expert of a layer takes from each row of the micro-batch."""

    tokens: int
    """Tokens of one row that an expert takes."""
    num_experts: int
    row_tokens: int
    """Tokens of a row."""
    num_rows: int
    """Rows of the micro-batch, on however many processes."""
    token_index_N: Tensor
    """The index of each of this process's tokens in the micro-batch, row after row, int64; negative for padding."""

    @classmethod
    def build(cls, config: ModelConfig, token_index_N: Tensor, row_tokens: int, num_tokens: int) -> Capacity:
        """Build the capacity of ``config`` for ``num_tokens`` tokens in rows of ``row_tokens``, padding behind them."""
        # Rounded up: tokens that pad the last row to a length that ranks can share have no expert.
        num_rows = -(-num_tokens // row_tokens)
        return cls(capacity_of(config, row_tokens), config.num_experts, row_tokens, num_rows, token_index_N)

    def admit(self, experts_Nk: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the ids, with ``NO_EXPERT`` if the expert is full; padding has no expert and fills none.

        An expert takes a row's tokens in their order, so the result depends on the choices of other processes' tokens,
        but not on the processes that hold them; ``gather`` brings the tokens of all that share the sequence.
        Collective.
        """
        T, k = self.row_tokens * self.num_rows, experts_Nk.shape[1]
        everyone_PX = gather(torch.cat((self.token_index_N[:, None], experts_Nk), dim=1).int()).long()
        token_index_P, experts_Pk = everyone_PX[:, 0], everyone_PX[:, 1:]
        chosen_Tk = experts_Nk.new_full((T + 1, k), NO_EXPERT)
        chosen_Tk[_or_last(token_index_P, T)] = experts_Pk  # padding lands in a last token
        fits_Tk = self._earlier(chosen_Tk[:T]) < self.tokens
        fits_Tk = torch.cat((fits_Tk, fits_Tk.new_zeros(1, k)))
        return experts_Nk.where(fits_Tk[_or_last(self.token_index_N, T)], NO_EXPERT)

    def _earlier(self, chosen_Tk: Tensor) -> Tensor:
        """Return, for every choice, the number of earlier tokens in its row that made the same choice."""
        T, k = chosen_Tk.shape
        row_T = torch.arange(T, device=chosen_Tk.device) // self.row_tokens
        # choices with one expert and row form a group; having no expert is a group too
        group_R = (row_T[:, None] * (self.num_experts + 1) + chosen_Tk + 1).flatten()
        order_R = group_R.argsort(stable=True)
        sizes = group_R.new_zeros(self.num_rows * (self.num_experts + 1))
        sizes.scatter_add_(0, group_R, torch.ones_like(group_R))
        # the rank among all choices, less the rank of the group's first one
        rank_R = torch.empty_like(group_R)
        rank_R[order_R] = torch.arange(T * k, device=group_R.device)
        return (rank_R - (sizes.cumsum(0) - sizes)[group_R]).view(T, k)


def capacity_of(config: ModelConfig, row_tokens: int) -> int:
    """Return the tokens of a row that one expert takes: ``capacity_factor`` times the mean load, rounded up."""
    mean_load = Fraction(config.experts_per_token * row_tokens, config.num_experts)
    # the factor as it was written: the nearest binary number to 1.1, ten times, is more than 11 and would round to 12
    return max(1, math.ceil(Fraction(str(config.capacity_factor)) * mean_load))


def _or_last(token_index_N: Tensor, last: int) -> Tensor:
    return token_index_N.where(token_index_N >= 0, last)
