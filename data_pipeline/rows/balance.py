"""Which rows of a step go through the model together, and on which rank: as much work on each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from data_pipeline.rows.micro_batches import MicroBatches

_EVEN = 1.001
"""The busiest rank's work over the mean at which nothing is exchanged any more: less than what a step's time varies."""
_MOST_SWAPS = 64


def balanced(costs: Sequence[int], micro_batches: MicroBatches, *, lockstep: bool = False) -> list[int]:
    """The row at each place that ``micro_batches`` deals out: a permutation of a step's rows, whose work is ``costs``.

    The costliest row goes to the rank that has least so far (longest processing time first, Graham 1969), and the
    busiest rank then exchanges rows with the idlest one until they are even. Each rank begins with its costliest rows.

    With ``lockstep``, where ranks wait for one another in each micro-batch and not only at the step's end, rows of like
    work share a micro-batch, the costliest the first one: no other order has the busiest ranks of all micro-batches
    do less together. Within it the costliest row goes to the rank that has least so far.

    One data rank takes rows in their order.
    """
    ranks = micro_batches.data_degree
    if ranks == 1:
        return list(range(len(costs)))
    # Equal costs in the order of rows: every process must come to the same.
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])
    loads = [0] * ranks
    if lockstep:
        dealt: list[list[int]] = [[] for _ in range(ranks)]
        first = 0
        for size in micro_batches.sizes:
            like = rows[first : first + size * ranks]
            for own, more in zip(dealt, _dealt(like, costs, loads), strict=True):
                own += more
            first += size * ranks
    else:
        dealt = _dealt(rows, costs, loads)
        _exchange(dealt, costs, loads)
        for own in dealt:
            own.sort(key=lambda row: (-costs[row], row))
    places = [0] * len(costs)
    for rank, own in enumerate(dealt):
        following = iter(own)
        for number in range(len(micro_batches)):
            for place in micro_batches.rows(number, rank):
                places[place] = next(following)
    return places


def _dealt(rows: Sequence[int], costs: Sequence[int], loads: list[int]) -> list[list[int]]:
    """Rows, costliest first, dealt out to ranks, equally many to each; adds to the ranks' ``loads``."""
    ranks = len(loads)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    # Those with room, least load first.
    waiting = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(waiting)
    for row in rows:
        load, rank = heapq.heappop(waiting)
        dealt[rank].append(row)
        loads[rank] = load + costs[row]
        if len(dealt[rank]) < len(rows) // ranks:
            heapq.heappush(waiting, (loads[rank], rank))
    return dealt


def _exchange(dealt: list[list[int]], costs: Sequence[int], loads: list[int]) -> None:
    """Exchange two rows of the busiest and the idlest rank, those that leave them the most even, until none help."""
    # As many rows on each rank: who takes the last ones has no choice left, and may end far above the others.
    mean = sum(loads) / len(loads)
    for _ in range(_MOST_SWAPS):
        busiest, idlest = loads.index(max(loads)), loads.index(min(loads))
        if loads[busiest] <= _EVEN * mean:
            return
        own, other = (np.array([costs[row] for row in dealt[rank]], np.float64) for rank in (busiest, idlest))
        moved = own[:, None] - other
        largest = np.maximum(loads[busiest] - moved, loads[idlest] + moved)
        nth, other_nth = divmod(int(largest.argmin()), len(other))
        row, other_row = dealt[busiest][nth], dealt[idlest][other_nth]
        difference = costs[row] - costs[other_row]
        if max(loads[busiest] - difference, loads[idlest] + difference) >= loads[busiest]:
            return
        dealt[busiest][nth], dealt[idlest][other_nth] = other_row, row
        loads[busiest] -= difference
        loads[idlest] += difference
