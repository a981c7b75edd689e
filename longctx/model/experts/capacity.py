"""Expert capacity: the limit on a row's tokens that one expert takes; later ones are dropped.

Axes: N tokens of this process, P tokens of all processes that share the sequence, T tokens in the full micro-batch, E
experts, k experts per token, R = T·k assignments.
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


# Capacity (GShard, arXiv 2006.16668) with a fixed drop order: an expert takes a row's tokens in token order until it is
# full. Every process ranks the gathered choices of all tokens and keeps its own part. Invariant: the result depends on
# token indices, never on how tokens are spread over processes.
@dataclass(frozen=True, eq=False)
class Capacity:
    """Limit on the tokens that each expert in a layer takes from each micro-batch row."""

    tokens: int
    """Tokens that an expert takes from one row."""
    num_experts: int
    row_tokens: int
    """Tokens per row."""
    num_rows: int
    """Rows in the micro-batch, over all processes."""
    token_index_N: Tensor
    """Micro-batch index for each of this process's tokens, row after row, int64; negative for padding."""

    @classmethod
    def build(cls, config: ModelConfig, token_index_N: Tensor, row_tokens: int, num_tokens: int) -> Capacity:
        """Build ``config``'s capacity for ``num_tokens`` tokens in rows of ``row_tokens``, with padding at the end."""
        # Rounded up: tokens that pad the last row, so that ranks can share it, have no expert.
        num_rows = -(-num_tokens // row_tokens)
        return cls(capacity_of(config, row_tokens), config.num_experts, row_tokens, num_rows, token_index_N)

    def admit(self, experts_Nk: Tensor, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the ids, with ``NO_EXPERT`` if the expert is full; padding neither has an expert nor fills one.

        An expert takes a row's tokens in their order, so the result depends on other processes' choices, but not on
        which process holds which token; ``gather`` collects the tokens from all that share the sequence. Collective.
        """
        T, k = self.row_tokens * self.num_rows, experts_Nk.shape[1]
        gathered_PX = gather(torch.cat((self.token_index_N[:, None], experts_Nk), dim=1).int()).long()
        token_index_P, experts_Pk = gathered_PX[:, 0], gathered_PX[:, 1:]
        chosen_Tk = experts_Nk.new_full((T + 1, k), NO_EXPERT)
        chosen_Tk[_or_last(token_index_P, T)] = experts_Pk  # padding goes to an extra last token
        fits_Tk = self._count_previous(chosen_Tk[:T]) < self.tokens
        fits_Tk = torch.cat((fits_Tk, fits_Tk.new_zeros(1, k)))
        return experts_Nk.where(fits_Tk[_or_last(self.token_index_N, T)], NO_EXPERT)

    def _count_previous(self, chosen_Tk: Tensor) -> Tensor:
        """Count, for every choice, the earlier tokens in its row that made the same choice."""
        T, k = chosen_Tk.shape
        row_T = torch.arange(T, device=chosen_Tk.device) // self.row_tokens
        # Choices with one expert and row form a group; those without an expert form a group too.
        group_R = (row_T[:, None] * (self.num_experts + 1) + chosen_Tk + 1).flatten()
        order_R = group_R.argsort(stable=True)
        sizes = group_R.new_zeros(self.num_rows * (self.num_experts + 1))
        sizes.scatter_add_(0, group_R, torch.ones_like(group_R))
        # The rank among all choices, minus that of the group's first one.
        rank_R = torch.empty_like(group_R)
        rank_R[order_R] = torch.arange(T * k, device=group_R.device)
        return (rank_R - (sizes.cumsum(0) - sizes)[group_R]).view(T, k)


def capacity_of(config: ModelConfig, row_tokens: int) -> int:
    """Return the tokens that one expert takes from a row: ``capacity_factor`` times the mean load, rounded up."""
    mean_load = Fraction(config.experts_per_token * row_tokens, config.num_experts)
    # Take the factor as written: the binary number nearest to 1.1, times ten, exceeds 11 and would round to 12.
    return max(1, math.ceil(Fraction(str(config.capacity_factor)) * mean_load))


def _or_last(token_index_N: Tensor, last: int) -> Tensor:
    return token_index_N.where(token_index_N >= 0, last)
