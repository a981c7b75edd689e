"""Packed rows as batches: the same global rows for every number of ranks, and a state that resumes on any number.

Step s takes the global rows [s·R, (s+1)·R), R = ``rows_per_step``. Micro-batch a of data rank d takes the B rows from
s·R + a·(D·B) + d·B. Rows of epoch e + 1 follow those of epoch e directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from data_pipeline.rows.batches import Pieces, build_batch
from data_pipeline.rows.pack import PLAN_VERSION, PackReport, RowPlan, plan_rows
from data_pipeline.shards.reader import ShardSet
from longctx.batch import Batch
from longctx.errors import ConfigError, DataError

STATE_FORMAT = "longctx-loader"


def build_loader(
    folder: str | Path,
    *,
    seq_len: int,
    rows_per_step: int,
    micro_batch_rows: int = 1,
    data_rank: int = 0,
    data_degree: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    verify: bool = True,
) -> Loader:
    """An endless iterator of this data rank's micro-batches [micro_batch_rows, seq_len] from a shard folder.

    ``rows_per_step`` counts rows of all ranks and micro-batches together. ``verify`` reads every shard once to check
    its checksum. Raises ``ConfigError`` for sizes that do not fit, ``DataError`` for a folder that cannot be read.
    """
    _check_sizes(seq_len=seq_len, micro_batch_rows=micro_batch_rows, data_rank=data_rank, data_degree=data_degree)
    _check_rows_per_step(rows_per_step, data_degree=data_degree, micro_batch_rows=micro_batch_rows)
    return Loader(
        _open(folder, verify=verify),
        seq_len=seq_len,
        rows_per_step=rows_per_step,
        micro_batch_rows=micro_batch_rows,
        data_rank=data_rank,
        data_degree=data_degree,
        seed=seed,
        shuffle=shuffle,
    )


def build_validation_loader(
    folder: str | Path,
    *,
    seq_len: int,
    max_rows: int | None = None,
    micro_batch_rows: int = 1,
    data_rank: int = 0,
    data_degree: int = 1,
    verify: bool = True,
) -> ValidationLoader:
    """The first ``max_rows`` rows (all, if None) of a shard folder, in a fixed order, once each time it is iterated.

    Every rank gets equally many micro-batches; where rows do not divide, the last ones hold padding alone.
    """
    _check_sizes(seq_len=seq_len, micro_batch_rows=micro_batch_rows, data_rank=data_rank, data_degree=data_degree)
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"max_rows={max_rows} must be at least 1. Leave it out to use every row.")
    return ValidationLoader(
        _open(folder, verify=verify),
        seq_len=seq_len,
        max_rows=max_rows,
        micro_batch_rows=micro_batch_rows,
        data_rank=data_rank,
        data_degree=data_degree,
    )


class Loader:
    """Endless micro-batches for one data rank. ``build_loader`` makes it."""

    def __init__(
        self,
        shards: ShardSet,
        *,
        seq_len: int,
        rows_per_step: int,
        micro_batch_rows: int,
        data_rank: int,
        data_degree: int,
        seed: int,
        shuffle: bool,
    ) -> None:
        self.shards = shards
        self.seq_len = seq_len
        self.micro_batches_per_step = rows_per_step // (data_degree * micro_batch_rows)
        """Micro-batches that this rank takes for one step."""
        self._rows_per_step = rows_per_step
        self._micro_batch_rows = micro_batch_rows
        self._data_rank = data_rank
        self._data_degree = data_degree
        self._seed = seed
        self._shuffle = shuffle
        self._plans: dict[int, RowPlan] = {}
        self._epoch = 0
        # Where the last whole step ended; the state is these four numbers, so it never points into a step.
        self._epoch_row = 0
        """The next unread row of the epoch."""
        self._rows_consumed = 0
        self._tokens_consumed = 0
        # The step under way: all ranks' rows, and the micro-batch that comes next.
        self._step_rows: list[Pieces] = []
        self._micro_batch = 0

    def __iter__(self) -> Iterator[Batch]:
        """The loader itself: iteration goes on where it stands, and never ends."""
        return self

    def __next__(self) -> Batch:
        """The next micro-batch of this data rank."""
        if self._micro_batch == 0:
            self._step_rows = self._rows_of_step()
        # Ranks take neighbouring rows of the same micro-batch, as the module's docstring says.
        rows_of_all_ranks = self._data_degree * self._micro_batch_rows
        first = self._micro_batch * rows_of_all_ranks + self._data_rank * self._micro_batch_rows
        batch = build_batch(self.shards, self._step_rows[first : first + self._micro_batch_rows], self.seq_len)
        self._micro_batch += 1
        if self._micro_batch == self.micro_batches_per_step:
            self._finish_step()
        return batch

    @property
    def num_rows(self) -> int:
        """Rows of the epoch under way. Each epoch packs anew, so the number may differ by a few."""
        return self._plan(self._epoch).num_rows

    @property
    def epoch(self) -> int:
        """The epoch that the next step begins in, from 0."""
        return self._epoch

    @property
    def rows_consumed(self) -> int:
        """Rows of all completed steps, over all ranks."""
        return self._rows_consumed

    @property
    def tokens_consumed(self) -> int:
        """Tokens of all completed steps, over all ranks, without padding."""
        return self._tokens_consumed

    def pack_report(self) -> PackReport:
        """Padding, cuts and truncation of the epoch under way."""
        return self._plan(self._epoch).report(self.shards.lengths)

    def state_dict(self) -> dict[str, Any]:
        """Where the last completed step ended: plain JSON, the same on every rank, good for any number of ranks."""
        return {
            "format": STATE_FORMAT,
            "plan_version": PLAN_VERSION,
            "manifest_hash": self.shards.manifest.hash,
            "seed": self._seed,
            "seq_len": self.seq_len,
            "shuffle": self._shuffle,
            "rows_consumed": self._rows_consumed,
            "tokens_consumed": self._tokens_consumed,
            "epoch": self._epoch,
            "epoch_row": self._epoch_row,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on after the step at which ``state`` was taken; ``DataError`` if it is of other data or another order."""
        own = self.state_dict()
        # A missing field would be a silent default, and a field too many belongs to another release.
        if not isinstance(state, dict) or set(state) != set(own):
            raise DataError(f"This is not a loader state: it needs exactly the fields {', '.join(own)}.")
        # Row numbers mean the same rows only where all of these are equal.
        for name in ("format", "plan_version", "manifest_hash", "seed", "seq_len", "shuffle"):
            if state[name] != own[name]:
                raise DataError(
                    f"The loader state has {name}={state[name]!r}, this run {own[name]!r} ({self.shards.folder}).\n"
                    "Resume with the same shard folder, seed, seq_len and shuffle, or start without the state."
                )
        counters = ("rows_consumed", "tokens_consumed", "epoch", "epoch_row")
        # type(), not isinstance(): in Python True is an int.
        if not all(type(state[name]) is int and state[name] >= 0 for name in counters):
            raise DataError(f"The loader state is damaged: {', '.join(counters)} must be whole numbers of at least 0.")
        if state["epoch_row"] >= self._plan(state["epoch"]).num_rows:
            raise DataError(f"The loader state is damaged: epoch {state['epoch']} has no row {state['epoch_row']}.")
        self._epoch, self._epoch_row = state["epoch"], state["epoch_row"]
        self._rows_consumed, self._tokens_consumed = state["rows_consumed"], state["tokens_consumed"]
        # What was read of a step under way is read again, from its first micro-batch.
        self._micro_batch = 0

    def _rows_of_step(self) -> list[Pieces]:
        """The next ``rows_per_step`` global rows, across as many epochs as they take."""
        rows: list[Pieces] = []
        # Local copies: the state moves in ``_finish_step`` only.
        epoch = self._epoch
        row = self._epoch_row
        while len(rows) < self._rows_per_step:
            rows.append(self._plan(epoch).row(row))
            epoch, row = self._after(epoch, row)
        return rows

    def _finish_step(self) -> None:
        """Count the step's rows and tokens, and move to the row after them."""
        for _ in self._step_rows:
            self._epoch, self._epoch_row = self._after(self._epoch, self._epoch_row)
        self._rows_consumed += len(self._step_rows)
        self._tokens_consumed += sum(stop - start for row in self._step_rows for _, start, stop in row)
        self._micro_batch = 0

    def _after(self, epoch: int, row: int) -> tuple[int, int]:
        """Epoch and row of the row that follows."""
        if row + 1 < self._plan(epoch).num_rows:
            return epoch, row + 1
        return epoch + 1, 0

    def _plan(self, epoch: int) -> RowPlan:
        """The rows of an epoch, planned once."""
        if epoch not in self._plans:
            plan = plan_rows(self.shards.lengths, self.seq_len, seed=self._seed, epoch=epoch, shuffle=self._shuffle)
            # A step may reach from one epoch into the next; plans of earlier epochs only cost memory.
            current = {e: p for e, p in self._plans.items() if e == self._epoch}
            self._plans = current | {epoch: plan}
        return self._plans[epoch]


class ValidationLoader:
    """A fixed number of rows in a fixed order, for one data rank. ``build_validation_loader`` makes it."""

    def __init__(
        self,
        shards: ShardSet,
        *,
        seq_len: int,
        max_rows: int | None,
        micro_batch_rows: int,
        data_rank: int,
        data_degree: int,
    ) -> None:
        self.shards = shards
        self.seq_len = seq_len
        # No shuffle and no seed: losses of different runs are over the same rows.
        self._plan = plan_rows(shards.lengths, seq_len, shuffle=False)
        self.num_rows = self._plan.num_rows
        """Rows with text, over all ranks."""
        if max_rows is not None:
            self.num_rows = min(max_rows, self.num_rows)
        self._micro_batch_rows = micro_batch_rows
        self._data_rank = data_rank
        self._data_degree = data_degree

    def __len__(self) -> int:
        """Micro-batches on each rank, the same everywhere."""
        # Rounded up: the last rows are never left out.
        return -(-self.num_rows // (self._data_degree * self._micro_batch_rows))

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches, from the first row each time."""
        for number in range(len(self)):
            first = (number * self._data_degree + self._data_rank) * self._micro_batch_rows
            rows: list[Pieces] = []
            for row in range(first, first + self._micro_batch_rows):
                # Every rank takes part in every collective, so a rank without rows gets rows of padding.
                pieces: Pieces = []
                if row < self.num_rows:
                    pieces = self._plan.row(row)
                rows.append(pieces)
            yield build_batch(self.shards, rows, self.seq_len)


def _open(folder: str | Path, *, verify: bool) -> ShardSet:
    """The shard folder; ``DataError`` if it has no documents."""
    shards = ShardSet.open(folder, verify=verify)
    if not shards.num_documents:
        raise DataError(f"{folder} holds no documents. Build it again from a source with text.")
    return shards


def _check_sizes(*, seq_len: int, micro_batch_rows: int, data_rank: int, data_degree: int) -> None:
    for name, value in (("seq_len", seq_len), ("micro_batch_rows", micro_batch_rows), ("data_degree", data_degree)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")
    if not 0 <= data_rank < data_degree:
        raise ConfigError(f"data_rank={data_rank} must be at least 0 and below data_degree={data_degree}.")


def _check_rows_per_step(rows_per_step: int, *, data_degree: int, micro_batch_rows: int) -> None:
    unit = data_degree * micro_batch_rows
    if rows_per_step < 1 or rows_per_step % unit:
        below = max(rows_per_step // unit, 0) * unit
        nearest = f"{below + unit}"
        if below:
            nearest = f"{below} or {below + unit}"
        raise ConfigError(
            f"rows_per_step={rows_per_step} does not divide among data_degree={data_degree} × "
            f"micro_batch_rows={micro_batch_rows} = {unit} rows. Try rows_per_step={nearest}."
        )
