"""GatherStates: exchange linear-attention states between a sequence's ranks, in one all-gather.

Axes: B batch, K key/value heads, D key head size, W = V + 1 for value head size V, s states, P ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from parallel.comm.messages.kinds import Kind
from parallel.mesh import Mesh
from parallel.runtime.activity import ACTIVITY
from parallel.schedule.states import SplitSegment, StatePlan


@dataclass(frozen=True)
class GatherStates:
    """Exchange states within a context group; each rank sums those it needs in sequence order."""

    mesh: Mesh
    states: StatePlan
    layer: int = field(default_factory=lambda: ACTIVITY.layer)
    """Layer for messages; stored because backward does not mark layers."""

    def carry(self, sent_sBKDW: Tensor) -> Callable[[], Tensor]:
        """Start gathering states; the result sums, per segment, its document's earlier ones (all others, if not
        causal).
        """
        return self._exchange(
            sent_sBKDW, self.states.given, self.states.taken, before=True, after=not self.states.causal
        )

    def carry_back(self, grad_received_sBKDW: Tensor) -> Callable[[], Tensor]:
        """Start gathering gradients; the result sums, per sent state, those from all segments that received it."""
        return self._exchange(
            grad_received_sBKDW, self.states.taken, self.states.given, before=not self.states.causal, after=True
        )

    def _exchange(
        self,
        mine_sBKDW: Tensor,
        sent: tuple[tuple[SplitSegment, ...], ...],
        wanted: tuple[tuple[SplitSegment, ...], ...],
        *,
        before: bool,
        after: bool,
    ) -> Callable[[], Tensor]:
        """Start gathering the states that all ranks send; the result computes the sums that this rank needs."""
        pending = start_gather(
            self.mesh, mine_sBKDW, sent, operation="gathering linear attention states", layer=self.layer
        )
        own = wanted[self.mesh.context_rank]

        def finish() -> Tensor:
            by_rank = pending()
            sums = by_rank.new_zeros(len(own), *by_rank.shape[2:])
            if before:
                _add_running(sums, own, sent, by_rank, backwards=False)
            if after:
                _add_running(sums, own, sent, by_rank, backwards=True)
            return sums

        return finish


def start_gather(
    mesh: Mesh, mine_s: Tensor, sent: Sequence[Sequence[SplitSegment]], *, operation: str, layer: int
) -> Callable[[], Tensor]:
    """Start gathering each rank's tensor [s, …], with one entry per sent segment, to [P, s, …]."""
    # An all-gather needs equal sizes, so pad every rank to the one that sends the most.
    slots = max(map(len, sent))
    send_buffer = torch.cat((mine_s, mine_s.new_zeros(slots - len(mine_s), *mine_s.shape[1:])))
    group = mesh.context_group
    assert group is not None
    # The ledger's checksum includes the padding, which is sent, too.
    (pending,) = mesh.comm.start_all_gather(
        send_buffer, group=group, operation=operation, kind=Kind.STATES, layer=layer
    )
    return lambda: pending.wait()[0]


class _Source(NamedTuple):
    """State sent by one rank."""

    order: int
    """First token of its segment, negative if sums run backward."""
    rank: int
    slot: int


def _add_running(
    sums_sBKDW: Tensor,
    wanted: Sequence[SplitSegment],
    sent: Sequence[Sequence[SplitSegment]],
    states_PsBKDW: Tensor,
    *,
    backwards: bool,
) -> None:
    """Add to each segment's sum the states before it in its document (after it, if backwards), nearest last."""
    sign = 1
    if backwards:
        sign = -1
    sources: dict[int, list[_Source]] = {x.document: [] for x in wanted}
    for rank, of_rank in enumerate(sent):
        for slot, x in enumerate(of_rank):
            if x.document in sources:
                sources[x.document].append(_Source(sign * x.start, rank, slot))
    totals: dict[int, Tensor] = {}
    for document, found in sources.items():
        found.sort(reverse=True)  # pop takes from the end
        totals[document] = torch.zeros_like(sums_sBKDW[0])
    # Sequence order, whichever rank sent a state: sums are bitwise reproducible.
    for n in sorted(range(len(wanted)), key=lambda n: sign * wanted[n].start):
        document, start = wanted[n].document, sign * wanted[n].start
        # Add each state to its document's running total once, so the work is linear in the number of states.
        while sources[document] and sources[document][-1].order < start:
            source = sources[document].pop()
            totals[document] += states_PsBKDW[source.rank, source.slot]
        sums_sBKDW[n] += totals[document]
