"""Balanced assignment of a step's rows to micro-batches and ranks. Pure arithmetic."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class MicroBatches:
    """Assignment of one step's rows in order: by micro-batch, and within a micro-batch by data rank."""

    sizes: tuple[int, ...]
    """Rows per micro-batch, the same on every data rank, so that collectives stay in step. Sizes differ by at most one,
    with larger ones first."""
    data_degree: int = 1
    """Number of data ranks."""

    @classmethod
    def assign(cls, rows_per_step: int, *, most_rows: int, data_degree: int = 1) -> MicroBatches:
        """Return the fewest micro-batches with at most ``most_rows`` rows each, as equal as possible.

        ``rows_per_step`` counts rows over all data ranks, which hold equally many.
        """
        rows, rest = divmod(rows_per_step, data_degree)
        assert rows > 0, f"{rows_per_step} rows over {data_degree} data ranks"
        assert not rest, f"{rows_per_step} rows over {data_degree} data ranks"
        count = -(-rows // most_rows)
        each, larger = divmod(rows, count)
        return cls((each + 1,) * larger + (each,) * (count - larger), data_degree)

    def __len__(self) -> int:
        """Return the number of micro-batches per data rank and step."""
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """Rows in the largest micro-batch."""
        return self.sizes[0]

    def rows(self, number: int, data_rank: int) -> range:
        """Return the step's rows in one micro-batch on one data rank."""
        size = self.sizes[number]
        first = sum(self.sizes[:number]) * self.data_degree + data_rank * size
        return range(first, first + size)


_EVEN = 1.001
"""Ratio of the maximum to the mean load at which swapping stops: less than the normal variation in step time."""
_MOST_SWAPS = 64


# Balancing is multiway number partitioning with equal cardinalities, which is NP-hard; longest processing time first
# (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969) plus pairwise swaps is close to optimal for realistic
# rows. The result only permutes rows within a step, so the step's gradient, a sum over its rows, does not depend on it
# (up to floating-point summation order). It is deterministic: every rank computes the same assignment without
# communication.
def balanced(costs: Sequence[int], micro_batches: MicroBatches, *, sync_per_micro_batch: bool = False) -> list[int]:
    """Return the row at each position in ``micro_batches``: a permutation of a step's rows, balanced by ``costs``.

    The costliest row goes to the rank with the least load so far, and the busiest rank then swaps rows with the idlest
    one until they are even. Each rank starts with its costliest rows.

    With ``sync_per_micro_batch``, ranks wait for one another in every micro-batch and not only at the end of the step.
    Rows with similar cost are then in the same micro-batch, the costliest ones first, which minimizes the summed
    maximum load over micro-batches. Within a micro-batch the costliest row goes to the rank with the least load so far.

    A single data rank takes rows in order.
    """
    ranks = micro_batches.data_degree
    if ranks == 1:
        return list(range(len(costs)))
    # A stable sort keeps ties in row order: every process must get the same result.
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])
    loads = [0] * ranks
    if sync_per_micro_batch:
        assigned: list[list[int]] = [[] for _ in range(ranks)]
        first = 0
        for size in micro_batches.sizes:
            like = rows[first : first + size * ranks]
            for own, extra in zip(assigned, _assign_rows(like, costs, loads), strict=True):
                own += extra
            first += size * ranks
    else:
        assigned = _assign_rows(rows, costs, loads)
        _swap_rows(assigned, costs, loads)
        for own in assigned:
            own.sort(key=lambda row: (-costs[row], row))
    row_numbers = [0] * len(costs)
    for rank, own in enumerate(assigned):
        next_rows = iter(own)
        for number in range(len(micro_batches)):
            for place in micro_batches.rows(number, rank):
                row_numbers[place] = next(next_rows)
    return row_numbers


def _assign_rows(rows: Sequence[int], costs: Sequence[int], loads: list[int]) -> list[list[int]]:
    """Assign rows, costliest first, equally many to each rank; add their costs to ``loads``."""
    ranks = len(loads)
    assigned: list[list[int]] = [[] for _ in range(ranks)]
    # Ranks that can take more rows, least loaded first.
    waiting = [(load, rank) for rank, load in enumerate(loads)]
    heapq.heapify(waiting)
    for row in rows:
        load, rank = heapq.heappop(waiting)
        assigned[rank].append(row)
        loads[rank] = load + costs[row]
        if len(assigned[rank]) < len(rows) // ranks:
            heapq.heappush(waiting, (loads[rank], rank))
    return assigned


def _swap_rows(assigned: list[list[int]], costs: Sequence[int], loads: list[int]) -> None:
    """Swap rows between the busiest and the idlest rank, each time the pair that evens them most, while swaps help."""
    # Ranks have equally many rows, so the rank that takes the last rows may end far above the others.
    mean = sum(loads) / len(loads)
    for _ in range(_MOST_SWAPS):
        most_loaded, least_loaded = loads.index(max(loads)), loads.index(min(loads))
        if loads[most_loaded] <= _EVEN * mean:
            return
        own, other = (
            np.array([costs[row] for row in assigned[rank]], np.float64) for rank in (most_loaded, least_loaded)
        )
        moved = own[:, None] - other
        largest = np.maximum(loads[most_loaded] - moved, loads[least_loaded] + moved)
        nth, other_nth = divmod(int(largest.argmin()), len(other))
        row, other_row = assigned[most_loaded][nth], assigned[least_loaded][other_nth]
        difference = costs[row] - costs[other_row]
        if max(loads[most_loaded] - difference, loads[least_loaded] + difference) >= loads[most_loaded]:
            return
        assigned[most_loaded][nth], assigned[least_loaded][other_nth] = other_row, row
        loads[most_loaded] -= difference
        loads[least_loaded] += difference
