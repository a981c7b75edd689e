"""Assignment of a step's rows to micro-batches and ranks with balanced work. Pure arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MicroBatches:
    """The rows of one step, assigned in order: by micro-batch, and within one by data rank."""

    sizes: tuple[int, ...]
    """Rows of each micro-batch, the same on every data rank, so that ranks of a collective stay in step. They differ by
    one at most; the larger ones come first."""
    data_degree: int = 1
    """Data ranks."""

    @classmethod
    def deal(cls, rows_per_step: int, *, most_rows: int, data_degree: int = 1) -> MicroBatches:
        """Return the fewest micro-batches of at most ``most_rows`` rows, as equal as possible.

        ``rows_per_step`` counts the rows of all data ranks, which share them equally.
        """
        rows, rest = divmod(rows_per_step, data_degree)
        assert rows > 0, f"{rows_per_step} rows over {data_degree} data ranks"
        assert not rest, f"{rows_per_step} rows over {data_degree} data ranks"
        count = -(-rows // most_rows)
        each, larger = divmod(rows, count)
        return cls((each + 1,) * larger + (each,) * (count - larger), data_degree)

    def __len__(self) -> int:
        """Return the number of micro-batches that each data rank takes for one step."""
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """Number of rows of the largest one."""
        return self.sizes[0]

    def rows(self, number: int, data_rank: int) -> range:
        """Return the step's rows in one micro-batch of one data rank."""
        size = self.sizes[number]
        first = sum(self.sizes[:number]) * self.data_degree + data_rank * size
        return range(first, first + size)


_EVEN = 1.001
"""The busiest rank's work over the mean at which nothing is exchanged any more: less than what a step's time varies."""
_MOST_SWAPS = 64


def balanced(costs: Sequence[int], micro_batches: MicroBatches, *, lockstep: bool = False) -> list[int]:
    """Return the row at each place of ``micro_batches``: a permutation of a step's rows, balanced by ``costs``.

    The costliest row goes to the rank with the least work so far (longest processing time first, Graham 1969), and the
    busiest rank then exchanges rows with the idlest one until they are even. Each rank begins with its costliest rows.

    With ``lockstep``, ranks wait for one another in each micro-batch and not only at the step's end. Rows of similar
    work then share a micro-batch, the costliest ones the first: this minimizes the sum of the busiest ranks' work over
    all micro-batches. Within a micro-batch the costliest row goes to the rank with the least work so far.

    A single data rank takes rows in their order.
    """
    ranks = micro_batches.data_degree
    if ranks == 1:
        return list(range(len(costs)))
    # Ties in the order of rows: every process must get the same result.
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
    """Return rows, costliest first, assigned to ranks, equally many to each; add their costs to ``loads``."""
    ranks = len(loads)
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    # Ranks with room, least load first.
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
    """Swap rows between the busiest and the idlest rank, choosing the swap that evens them most, until none helps."""
    # Ranks have equally many rows: the one that takes the last rows may end far above the
    # others.
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
