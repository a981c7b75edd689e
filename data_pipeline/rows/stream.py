"""Endless rows of one shard folder: blocks in order, epoch after epoch.

The row length may change at any row. The rest of the current block is then packed again, without losing or repeating a
token: the position records how many rows were taken at each length.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from data_pipeline.rows.blocks import BlockPlanner, Stretch
from data_pipeline.rows.pack import Row


@dataclass(frozen=True)
class StreamPosition:
    """Position of the next row of a stream, a function of the rows taken before."""

    epoch: int = 0
    epoch_row: int = 0
    """The row's number in its epoch."""
    block: int = 0
    block_row: int = 0
    """The row's number in its block, or in what ``before`` has left of that. Epoch, block and this one say where it is.
    """
    row_tokens: int = 0
    """The length of rows in this block; 0 before the first one."""
    before: tuple[Stretch, ...] = ()
    """What was taken of this block at other lengths."""

    def moved(self, rows: int) -> StreamPosition:
        """Return the position ``rows`` rows further, in this block."""
        # Called in each step: ``replace`` takes twice as long.
        return StreamPosition(
            self.epoch,
            self.epoch_row + rows,
            self.block,
            self.block_row + rows,
            self.row_tokens,
            self.before,
        )

    def at_block(self, epoch: int, block: int) -> StreamPosition:
        """Return the position at the beginning of a later block."""
        epoch_row = self.epoch_row
        if epoch != self.epoch:
            epoch_row = 0
        return StreamPosition(epoch, epoch_row, block, 0, self.row_tokens)

    def at_length(self, row_tokens: int) -> StreamPosition:
        """Return the same position for rows of another length: the rest of the block is then packed again."""
        if row_tokens == self.row_tokens:
            return self
        before = self.before
        if self.block_row:
            before = (*before, Stretch(self.row_tokens, self.block_row))
        return replace(self, block_row=0, row_tokens=row_tokens, before=before)


BEGINNING = StreamPosition()
"""The first row of all."""


class Stream:
    """Endless rows of a planner. It holds no position: the caller has one."""

    def __init__(self, planner: BlockPlanner) -> None:
        self.planner = planner

    def take(
        self, at: StreamPosition, count: int, row_tokens: int, *, epochs: int | None = None
    ) -> tuple[list[Row], int, StreamPosition]:
        """Return the next ``count`` rows of at most ``row_tokens`` tokens, their tokens, and the position after them.

        Returns fewer rows if ``epochs`` epochs end before. Raises ConfigError or DataError if an epoch has no row at
        all.
        """
        rows: list[Row] = []
        tokens = empty = 0
        # The rest of the block is packed again if its rows had another length so far.
        at = at.at_length(row_tokens)
        while len(rows) < count and (epochs is None or at.epoch < epochs):
            plan = self.planner.plan(at.epoch, at.block, row_tokens=row_tokens, before=at.before)
            # If upsampling leaves documents out, or pairs are too long, a block may have none.
            empty += 1
            if plan.num_rows:
                empty = 0
            if empty > self.planner.num_blocks:
                raise self.planner.no_row()
            stop = min(plan.num_rows, at.block_row + count - len(rows))
            found, found_tokens = plan.rows(at.block_row, stop)
            for row in found:
                row.epochs = (at.epoch,) * len(row)
            rows += found
            tokens += found_tokens
            epoch, block = self.planner.next_block(at.epoch, at.block)
            if stop > plan.num_rows // 2:
                # Planned in parallel with the next steps, which then never wait for it.
                self.planner.prepare(epoch, block, row_tokens=row_tokens)
            at = at.moved(stop - at.block_row)
            if stop == plan.num_rows:
                at = at.at_block(epoch, block)
        return rows, tokens, at

    def has_row(self, at: StreamPosition) -> bool:
        """Return whether there is a row at this position, which may come from an untrusted file."""
        if at.block >= self.planner.num_blocks:
            return False
        taken: tuple[Stretch, ...] = ()
        stretches = at.before
        # The first row of a block need not exist: the block may have none.
        if at.block_row:
            stretches = (*stretches, Stretch(at.row_tokens, at.block_row + 1))
        for stretch in stretches:
            # If a stretch took all rows, no tokens would be left to pack.
            plan = self.planner.plan(at.epoch, at.block, row_tokens=stretch.row_tokens or None, before=taken)
            if plan.num_rows < stretch.rows:
                return False
            taken = (*taken, stretch)
        return True
