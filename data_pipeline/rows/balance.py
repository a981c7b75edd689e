"""Which rows of a step go through the model together, and on which rank: as much work on each."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from data_pipeline.rows.micro_batches import MicroBatches


def balanced(costs: Sequence[int], micro_batches: MicroBatches) -> list[int]:
    """The row at each place that ``micro_batches`` deals out: a permutation of a step's rows, whose work is ``costs``.

    Rows of like work share a micro-batch, the costliest the first one: ranks that wait for one another in each wait
    little. Within it the costliest row goes to the rank that has least so far (longest processing time first, Graham
    1969), so that the ranks' sums are even at the end of the step. One data rank takes rows in their order.
    """
    ranks = micro_batches.data_degree
    if ranks == 1:
        return list(range(len(costs)))
    # Equal costs in the order of rows: every process must come to the same.
    rows = sorted(range(len(costs)), key=lambda row: -costs[row])
    loads, places = [0] * ranks, [0] * len(costs)
    first = 0
    for number, size in enumerate(micro_batches.sizes):
        room = [iter(micro_batches.rows(number, rank)) for rank in range(ranks)]
        left = [size] * ranks
        # Those with room, least load first.
        waiting = [(loads[rank], rank) for rank in range(ranks)]
        heapq.heapify(waiting)
        for row in rows[first : first + size * ranks]:
            load, rank = heapq.heappop(waiting)
            places[next(room[rank])] = row
            loads[rank] = load + costs[row]
            left[rank] -= 1
            if left[rank]:
                heapq.heappush(waiting, (loads[rank], rank))
        first += size * ranks
    return places
