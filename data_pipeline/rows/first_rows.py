"""``FirstRows``: the first rows of a shard folder in a fixed order, each found by its number."""

from __future__ import annotations

import bisect
from itertools import accumulate

from data_pipeline.rows.blocks import BlockPlanner, Deal
from data_pipeline.rows.row import Row
from data_pipeline.shards.reader import ShardSet


class FirstRows:
    """At most ``max_rows`` rows of epoch 0; all, if None. Two blocks of them are in memory at a time."""

    def __init__(
        self, shards: ShardSet, seq_len: int, *, max_rows: int | None = None, deal: Deal | None = None
    ) -> None:
        """``deal`` is that of the folder unless it is given."""
        # No shuffle and no seed: losses of different runs are over the same rows.
        self._planner = BlockPlanner(shards, seq_len, shuffle=False, deal=deal)
        # Blocks are planned until there are rows enough: of a large folder the first, or the first few.
        counts: list[int] = []
        while len(counts) < self._planner.num_blocks and (max_rows is None or sum(counts) < max_rows):
            counts.append(self._planner.plan(0, len(counts)).num_rows)
        self._first_rows = list(accumulate(counts, initial=0))
        self._num_rows = self._first_rows[-1]
        if max_rows is not None:
            self._num_rows = min(max_rows, self._num_rows)

    def __len__(self) -> int:
        """Rows."""
        return self._num_rows

    def __getitem__(self, row: int) -> Row:
        """A row by its number."""
        block = bisect.bisect_right(self._first_rows, row) - 1
        return self._planner.plan(0, block).row(row - self._first_rows[block])
