"""``RelayoutPlan``: the rows that change ranks between two placements of one sequence. Pure.

A row is a token's entry in a per-token tensor on one rank. Both sides derive the order of the rows between them from
the placements, so messages hold rows only: a sender's rows to one receiver follow its own row order. Rows whose token
stays on its rank are copied there and are in no message.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import torch
from numpy import ndarray
from torch import Tensor

from parallel.layout.token_placement import TokenPlacement


class RowIndex(NamedTuple):
    """The rows of ``RowMoves`` as int64 tensors on one device."""

    sent: Tensor
    received: Tensor
    kept_from: Tensor
    kept_to: Tensor


@dataclass(frozen=True, eq=False)
class RowMoves:
    """One rank's part of a relayout."""

    sent: ndarray
    """Rows to send, counted in the source placement, receiver after receiver."""
    send_counts: tuple[int, ...]
    """Rows to each rank; 0 to this one."""
    received: ndarray
    """Rows of the target placement for what arrives, sender after sender."""
    receive_counts: tuple[int, ...]
    """Rows from each rank; 0 from this one."""
    kept_from: ndarray
    """Source rows of tokens that stay on this rank, in the order of ``kept_to``."""
    kept_to: ndarray
    """Target rows of tokens that stay on this rank, ascending."""
    _index: dict[torch.device, RowIndex] = field(default_factory=dict, repr=False)

    def index(self, device: torch.device) -> RowIndex:
        """Return the rows on a device, copied there once: every layer and step uses the same."""
        if device not in self._index:
            rows = (self.sent, self.received, self.kept_from, self.kept_to)
            self._index[device] = RowIndex._make(torch.from_numpy(x).to(device, non_blocking=True) for x in rows)
        return self._index[device]


@dataclass(frozen=True, eq=False)
class RelayoutPlan:
    """Movement of every row from a ``source`` placement to a ``target`` placement; ``plan_relayout`` builds it."""

    source: TokenPlacement
    target: TokenPlacement
    _moves: dict[int, RowMoves] = field(default_factory=dict, repr=False)

    @property
    def problem(self) -> str | None:
        """Error message if the placements do not belong to one sequence over the same ranks, otherwise None."""
        source, target = self.source, self.target
        if (source.num_tokens, source.degree) == (target.num_tokens, target.degree):
            return None
        return (
            f"a relayout from {source.describe()} to {target.describe()}: both placements need the same tokens and "
            "ranks."
        )

    @property
    def digest(self) -> str:
        """Checksum, equal on all ranks that share a sequence."""
        return blake2b((self.source.digest + self.target.digest).encode(), digest_size=16).hexdigest()

    def describe(self) -> str:
        """Return a one-line summary with both placements."""
        return f"from {self.source.describe()} to {self.target.describe()}"

    @property
    def inverse(self) -> RelayoutPlan:
        """Plan for the way back."""
        return plan_relayout(self.target, self.source)

    @cached_property
    def num_moved(self) -> int:
        """Rows that change ranks, over all ranks; 0 if no rank sends a message."""
        return len(self._moved)

    def rows_sent(self, rank: int) -> int:
        """Return how many rows leave a rank."""
        return int(np.count_nonzero(self.source.token_ranks[self._moved] == rank))

    def rows_received(self, rank: int) -> int:
        """Return how many rows arrive at a rank."""
        return int(np.count_nonzero(self.target.token_ranks[self._moved] == rank))

    def moves(self, rank: int) -> RowMoves:
        """Return a rank's part: the rows that it sends, receives and keeps."""
        if rank not in self._moves:
            self._moves[rank] = _build_moves(self, rank)
        return self._moves[rank]

    @cached_property
    def _moved(self) -> ndarray:
        """Tokens that change ranks."""
        assert self.problem is None, self.problem
        return np.flatnonzero(self.source.token_ranks != self.target.token_ranks)


# A pair for each kind of layer, and its inverse for backward. A plan holds about 32 bytes per token.
@lru_cache(maxsize=32)
def plan_relayout(source: TokenPlacement, target: TokenPlacement) -> RelayoutPlan:
    """Return the plan between two placements; equal pairs share it. If its ``problem`` is not None, it has no moves."""
    return RelayoutPlan(source, target)


def _build_moves(plan: RelayoutPlan, rank: int) -> RowMoves:
    assert plan.problem is None, plan.problem
    source, target = plan.source, plan.target
    degree = source.degree
    source_tokens, target_tokens = source.tokens(rank), target.tokens(rank)

    receiver = target.token_ranks[source_tokens]
    leaving = np.flatnonzero(receiver != rank)
    # A stable sort by receiver keeps the sender's row order within each message.
    sent = leaving[np.argsort(receiver[leaving], kind="stable")]

    sender, sender_row = source.token_ranks[target_tokens], source.token_rows[target_tokens]
    arriving = np.flatnonzero(sender != rank)
    # The same order, seen from the receiver: by sender, then by the sender's row.
    received = arriving[np.lexsort((sender_row[arriving], sender[arriving]))]

    kept_to = np.flatnonzero(sender == rank)
    return RowMoves(
        sent=sent,
        send_counts=tuple(np.bincount(receiver[leaving], minlength=degree).tolist()),
        received=received,
        receive_counts=tuple(np.bincount(sender[arriving], minlength=degree).tolist()),
        kept_from=sender_row[kept_to],
        kept_to=kept_to,
    )
