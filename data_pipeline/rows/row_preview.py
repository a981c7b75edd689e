"""Preview of a training run's rows: packing, documents by length, and work per data rank, before any computation."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.rows.epoch_blocks import PackReport
from data_pipeline.rows.micro_batches import MicroBatches, balanced
from data_pipeline.rows.order import RowOrder
from data_pipeline.rows.row_reader import RowReader

STEPS = 64
"""Steps to analyze."""


@dataclass(frozen=True, kw_only=True)
class StepWork:
    """Busiest data rank's work per step as a multiple of the mean rank's.

    In lockstep, the sum over micro-batches of the busiest rank's work, as a multiple of the same mean.
    """

    in_order: list[float]
    balanced: list[float]
    """With ``data.balance``."""


@dataclass(frozen=True, kw_only=True)
class RowPreview:
    """Statistics on the rows that a training run will read."""

    packing: PackReport
    steps_of_epoch: float
    piece_tokens: dict[str, int]
    """Tokens in the analyzed rows by document piece length: key ``2^k`` covers pieces of 2^k to 2^(k+1) - 1 tokens."""
    work: StepWork


def preview_rows(
    order: RowOrder,
    reader: RowReader,
    micro_batches: MicroBatches,
    cost: Callable[..., int],
    *,
    documents: int,
    steps: int = STEPS,
    sync_per_micro_batch: bool = False,
) -> RowPreview:
    """Plan a training run's first rows without reading tokens; packing covers epoch blocks with at least ``documents``
    documents.

    ``reader`` defines how rows are read; ``cost`` returns a row's work from its document lengths and source lengths. A
    short epoch has fewer ``steps``, but at least one if its rows fill a step. With ``sync_per_micro_batch``, ranks wait
    for one another in every micro-batch.
    """
    packing = order.report(order.start(), documents=documents)
    rows_per_step = sum(micro_batches.sizes) * micro_batches.data_degree
    # A second epoch's rows would add no information.
    rows = order.first_rows(min(steps * rows_per_step, packing.rows))
    tokens: dict[str, int] = {}
    for row in rows:
        for _, start, stop in row:
            key = f"2^{(stop - start).bit_length() - 1}"
            tokens[key] = tokens.get(key, 0) + stop - start
    work = StepWork(in_order=[], balanced=[])
    costs = [cost(*lengths) for lengths in reader.lengths(rows)]
    # Full steps only: in a partial step, some ranks would have no work.
    for first in range(0, len(rows) - rows_per_step + 1, rows_per_step):
        of_step = costs[first : first + rows_per_step]
        row_numbers = balanced(of_step, micro_batches, sync_per_micro_batch=sync_per_micro_batch)
        work.in_order.append(
            straggler(of_step, range(rows_per_step), micro_batches, sync_per_micro_batch=sync_per_micro_batch)
        )
        work.balanced.append(straggler(of_step, row_numbers, micro_batches, sync_per_micro_batch=sync_per_micro_batch))
    return RowPreview(
        packing=packing,
        steps_of_epoch=packing.rows / rows_per_step,
        piece_tokens=dict(sorted(tokens.items(), key=lambda item: int(item[0].removeprefix("2^")))),
        work=work,
    )


def straggler(
    costs: Sequence[int], row_numbers: Sequence[int], micro_batches: MicroBatches, *, sync_per_micro_batch: bool
) -> float:
    """Return the work that all ranks wait for, divided by the mean rank's work, with row ``row_numbers[n]`` at position
    n.

    All ranks wait for the step's busiest rank; in lockstep, for the busiest rank in each micro-batch.
    """
    # loads [micro-batches, data ranks].
    loads = np.array(
        [
            [
                sum(costs[row_numbers[place]] for place in micro_batches.rows(number, rank))
                for rank in range(micro_batches.data_degree)
            ]
            for number in range(len(micro_batches))
        ],
        np.float64,
    )
    waited = loads.sum(0).max()
    if sync_per_micro_batch:
        waited = loads.max(1).sum()
    return float(waited / loads.sum(0).mean())
