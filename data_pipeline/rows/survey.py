"""How a run's rows will be: packing, documents by length, and the work of data ranks, before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.rows.blocks import PackReport
from data_pipeline.rows.micro_batches import MicroBatches, balanced
from data_pipeline.rows.order import Order
from data_pipeline.rows.sides import Sides

STEPS = 64
"""Steps whose work is looked at."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """The busiest data rank's work of each step as a multiple of the mean rank's.

    In lockstep, that of each micro-batch's busiest one, all micro-batches together.
    """

    in_order: list[float]
    balanced: list[float]
    """With ``data.balance``."""


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a run will read."""

    packing: PackReport
    steps_of_epoch: float
    piece_tokens: dict[str, int]
    """Tokens of the rows looked at, by the length of the piece that they stand in: key ``2^k`` counts pieces of 2^k to
    2^(k+1) - 1 tokens."""
    work: StepWork


def survey(
    order: Order,
    sides: Sides,
    micro_batches: MicroBatches,
    cost: Callable[..., int],
    *,
    documents: int,
    steps: int = STEPS,
    lockstep: bool = False,
) -> Survey:
    """Plan the first rows of a run, reading no tokens: blocks with at least so many ``documents`` for the packing.

    ``sides`` say what is read of the rows, and ``cost`` is the work of a row whose documents, and their sources, have
    these lengths. Of a short epoch there are fewer ``steps``, at least one where a step has rows enough. With
    ``lockstep`` ranks wait for one another in each micro-batch.
    """
    packing = order.report(order.start(), documents=documents)
    rows_per_step = sum(micro_batches.sizes) * micro_batches.data_degree
    # Rows of a second epoch would say nothing new.
    rows = order.first_rows(min(steps * rows_per_step, packing.rows))
    tokens: dict[str, int] = {}
    for row in rows:
        for _, start, stop in row:
            key = f"2^{(stop - start).bit_length() - 1}"
            tokens[key] = tokens.get(key, 0) + stop - start
    work = StepWork(in_order=[], balanced=[])
    costs = [cost(*lengths) for lengths in sides.lengths(rows)]
    for first in range(0, len(rows) - rows_per_step + 1, rows_per_step):
        of_step = costs[first : first + rows_per_step]
        places = balanced(of_step, micro_batches, lockstep=lockstep)
        work.in_order.append(straggler(of_step, range(rows_per_step), micro_batches, lockstep=lockstep))
        work.balanced.append(straggler(of_step, places, micro_batches, lockstep=lockstep))
    return Survey(
        packing=packing,
        steps_of_epoch=packing.rows / rows_per_step,
        piece_tokens=dict(sorted(tokens.items(), key=lambda item: int(item[0].removeprefix("2^")))),
        work=work,
    )


def straggler(costs: Sequence[int], places: Sequence[int], micro_batches: MicroBatches, *, lockstep: bool) -> float:
    """What ranks wait for over the mean rank's work, where the row ``places[n]`` lies at place n.

    That is the busiest rank's work of the step; in lockstep the sum of each micro-batch's busiest one.
    """
    loads = np.array(
        [
            [
                sum(costs[places[place]] for place in micro_batches.rows(number, rank))
                for rank in range(micro_batches.data_degree)
            ]
            for number in range(len(micro_batches))
        ],
        np.float64,
    )
    waited = loads.sum(0).max()
    if lockstep:
        waited = loads.max(1).sum()
    return float(waited / loads.sum(0).mean())
