"""Endless rows from one shard folder: epoch blocks in order, epoch after epoch.

The row length may change at any row. The rest of the current block is then packed again without losing or repeating a
token: the position records how many rows were taken at each length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_pipeline.rows.epoch_blocks import BlockPlanner, TakenRows
from data_pipeline.rows.pack import Row


@dataclass(frozen=True)
class StreamPosition:
    """Position of a stream's next row, a function of the rows taken before."""

    epoch: int = 0
    epoch_row: int = 0
    """Row index within the epoch."""
    block: int = 0
    block_row: int = 0
    """Row index within the epoch block, or within its rows that remain after ``before``. Epoch, block and this index
    locate the row.
    """
    row_tokens: int = 0
    """Row length in this block; 0 before the first row."""
    before: tuple[TakenRows, ...] = ()
    """Rows taken from this block at other lengths."""

    def moved(self, rows: int) -> StreamPosition:
        """Return the position ``rows`` rows further within this block."""
        # Called every step: ``replace`` takes twice as long.
        return StreamPosition(
            self.epoch,
            self.epoch_row + rows,
            self.block,
            self.block_row + rows,
            self.row_tokens,
            self.before,
        )

    def at_block(self, epoch: int, block: int) -> StreamPosition:
        """Return the position at the start of a later block."""
        epoch_row = self.epoch_row
        if epoch != self.epoch:
            epoch_row = 0
        return StreamPosition(epoch, epoch_row, block, 0, self.row_tokens)

    def at_length(self, row_tokens: int) -> StreamPosition:
        """Return the same position for another row length: the rest of the block is then packed again."""
        if row_tokens == self.row_tokens:
            return self
        before = self.before
        # Record rows already taken at the old length: the new plan covers only the tokens that remain.
        if self.block_row:
            before = (*before, TakenRows(self.row_tokens, self.block_row))
        return replace(self, block_row=0, row_tokens=row_tokens, before=before)


START = StreamPosition()
"""Position of the very first row."""


class RowStream:
    """Endless rows from a planner. The caller holds the position."""

    def __init__(self, planner: BlockPlanner) -> None:
        self.planner = planner

    def take(
        self, at: StreamPosition, count: int, row_tokens: int, *, epochs: int | None = None
    ) -> tuple[list[Row], int, StreamPosition]:
        """Return the next ``count`` rows with at most ``row_tokens`` tokens each, their tokens, and the position after
        them.

        Returns fewer rows if ``epochs`` epochs end first. Raises ConfigError or DataError if a full epoch has no row.
        """
        rows: list[Row] = []
        tokens = empty = 0
        # A changed row length makes the planner pack the rest of the block again.
        at = at.at_length(row_tokens)
        while len(rows) < count and (epochs is None or at.epoch < epochs):
            plan = self.planner.plan(at.epoch, at.block, row_tokens=row_tokens, before=at.before)
            # A block may be empty if upsampling leaves documents out or pairs are too long. A full epoch of empty
            # blocks is an error; without this check the loop would never end.
            empty += 1
            if plan.num_rows:
                empty = 0
            if empty > self.planner.num_blocks:
                raise self.planner.no_rows_error()
            stop = min(plan.num_rows, at.block_row + count - len(rows))
            found, found_tokens = plan.rows(at.block_row, stop)
            for row in found:
                row.epochs = (at.epoch,) * len(row)
            rows += found
            tokens += found_tokens
            epoch, block = self.planner.next_block(at.epoch, at.block)
            if stop > plan.num_rows // 2:
                # Plan the next block in parallel with the next steps, so that they never wait for it.
                self.planner.prepare(epoch, block, row_tokens=row_tokens)
            at = at.moved(stop - at.block_row)
            if stop == plan.num_rows:
                at = at.at_block(epoch, block)
        return rows, tokens, at

    def has_row(self, at: StreamPosition) -> bool:
        """Return whether a row exists at this position, which may come from an untrusted file."""
        if at.block >= self.planner.num_blocks:
            return False
        taken: tuple[TakenRows, ...] = ()
        stretches = at.before
        # A block's first row may not exist: the block may be empty.
        if at.block_row:
            stretches = (*stretches, TakenRows(at.row_tokens, at.block_row + 1))
        for taken_rows in stretches:
            # If earlier stretches took all rows, no tokens would be left to pack.
            plan = self.planner.plan(at.epoch, at.block, row_tokens=taken_rows.row_tokens or None, before=taken)
            if plan.num_rows < taken_rows.rows:
                return False
            taken = (*taken, taken_rows)
        return True
