"""Row order within a run: which documents are in global row n, for any number of ranks. This module orders one folder.

``data_pipeline.mixture.mixed_order`` orders several. An order holds no position: the loader does, and requests the rows
after it. States are validated strictly, because training on a wrong row raises no error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from data_pipeline.rows.epoch_blocks import PLAN_VERSION, BlockAssignment, BlockPlanner, PackReport
from data_pipeline.rows.fim import Fim, fim_of
from data_pipeline.rows.pack import BEST_FIT, Packing, Row
from data_pipeline.rows.row_stream import START, RowStream, StreamPosition
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError
from longctx.untrusted.strict_json import shown
from longctx.untrusted.untrusted_schema import MOST_WHOLE

STATE_FORMAT = "longctx-loader"

_OF_STREAM = ("epoch", "epoch_row", "block", "block_row")

_IDENTITY = (
    *("format", "plan_version", "manifest_hash", "seed", "seq_len", "source_seq_len", "shuffle", "packing"),
    "num_blocks",
)
"""Row numbers refer to the same rows only if all these values are equal."""


@dataclass(frozen=True)
class Position:
    """Loader position in one shard folder between two steps."""

    rows_consumed: int = 0
    """Rows over all steps and ranks."""
    tokens_consumed: int = 0
    """Tokens over all steps and ranks, without padding."""
    stream: StreamPosition = START

    @property
    def epoch(self) -> int:
        """Epoch that contains the next row."""
        return self.stream.epoch

    @property
    def counters(self) -> dict[str, int]:
        """Integers that make up the position, by name."""
        own = {"rows_consumed": self.rows_consumed, "tokens_consumed": self.tokens_consumed}
        return own | {name: getattr(self.stream, name) for name in _OF_STREAM}


def refuse_exclusions(state: Any) -> None:
    """Raise DataError if the state comes from a run with excluded shards: its rows can no longer be read."""
    if isinstance(state, dict) and state.get("excluded"):
        raise DataError(
            "The loader state lists excluded shards, which this release does not support.\n"
            "Leave the shards out with `longctx data build --without`, and start a new run from the weights "
            "(run.start_from)."
        )


def read_position(state: dict[str, Any], own: dict[str, Any], folder: Path) -> Position:
    """Return the position from a state, for a loader over ``folder`` with the state ``own``.

    Raises DataError if the state belongs to other data or another row order.
    """
    if isinstance(state, dict) and state.get("plan_version") == 1:
        state = _in_blocks(state, own["num_blocks"], folder)
    if isinstance(state, dict):
        # Releases with a single packing did not record it.
        state = {"packing": str(BEST_FIT)} | state
    refuse_exclusions(state)
    # A missing field would silently become a default, and an extra field belongs to another release.
    if not isinstance(state, dict) or set(state) != set(own):
        raise DataError(f"This is not a loader state: expected exactly the fields {', '.join(own)}.")
    for name in _IDENTITY:
        # Only states for pairs contain source_seq_len.
        if state.get(name) != own.get(name):
            raise DataError(
                f"The loader state has {name}={shown(state.get(name))}, but this run has {own.get(name)!r} "
                f"({folder}).\nResume with the same shard folder, seed, seq_len, packing and shuffle, or start a new "
                "run from the weights (run.start_from)."
            )
    counters = {name: state[name] for name in Position().counters}
    check_counters(counters)
    stream = StreamPosition(
        **{name: counters[name] for name in _OF_STREAM},
        row_tokens=own["seq_len"],
    )
    position = Position(counters["rows_consumed"], counters["tokens_consumed"], stream)
    block, epoch_row = stream.block, stream.epoch_row
    row = stream.block_row
    # Earlier epoch blocks' row counts are not verified: that would require planning them all.
    if epoch_row < row or (block == 0 and epoch_row != row):
        raise DataError(f"The loader state is damaged: row {row} of block {block} is not row {epoch_row} of its epoch.")
    return position


def check_counters(counters: dict[str, Any]) -> None:
    """Raise DataError unless all values are integers from 0 to 2^53."""
    # type() and not isinstance(): bool is a subclass of int.
    if not all(type(value) is int and 0 <= value <= MOST_WHOLE for value in counters.values()):
        raise DataError(f"The loader state is damaged: {', '.join(counters)} must be integers from 0 to 2^53.")


def _in_blocks(state: dict[str, Any], num_blocks: int, folder: Path) -> dict[str, Any]:
    """Convert a state from plan version 1, which had no blocks; raise DataError if the row order differed."""
    if num_blocks > 1:
        raise DataError(
            f"The loader state has plan version 1, which ordered the full corpus at once. This release orders {folder} "
            f"in {num_blocks} blocks, so it cannot locate the remaining rows.\n"
            "Finish the run with the release that started it, or start a new run from the weights (run.start_from)."
        )
    # A single epoch block is ordered exactly as version 1 ordered the corpus.
    return state | {"plan_version": PLAN_VERSION, "num_blocks": 1, "block": 0, "block_row": state.get("epoch_row")}


class RowOrder(Protocol):
    """Row order used by a loader. Positions are specific to each implementation."""

    @property
    def fim_by_folder(self) -> Sequence[Fim | None]:
        """Fill-in-the-middle per folder; None for a folder without it."""
        ...

    def start(self) -> Any:
        """Return the first row's position."""
        ...

    def rows(self, at: Any, count: int) -> tuple[list[Row], Any]:
        """Return the next ``count`` rows and the position after them; raise DataError if no rows remain."""
        ...

    def first_rows(self, most: int) -> list[Row]:
        """Return the first ``most`` rows, or fewer if no more exist."""
        ...

    def state(self, at: Any) -> dict[str, Any]:
        """Return a position as plain JSON, with all values that must match for it to refer to the same rows."""
        ...

    def read(self, state: dict[str, Any]) -> Any:
        """Return the position from a state; raise DataError if it belongs to other data or another row order."""
        ...

    def report(self, at: Any, *, documents: int = 1) -> PackReport:
        """Report the current epoch's packing cost, extrapolated from at least ``documents`` documents."""
        ...


class FolderOrder:
    """Row order within one shard folder."""

    def __init__(
        self,
        shards: ShardSet,
        seq_len: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        assignment: BlockAssignment | None = None,
        packing: Packing = BEST_FIT,
        source_seq_len: int = 0,
    ) -> None:
        """Initialize; ``assignment`` defaults to the folder's assignment, and ``source_seq_len`` bounds a row's source
        tokens.
        """
        self._source_seq_len = source_seq_len
        self._shards, self._seq_len, self._seed, self._shuffle = shards, seq_len, seed, shuffle
        self._packing = packing
        fim = fim_of(packing.fim, shards.tokenizer, seed=seed, seq_len=seq_len)
        self.fim_by_folder = (fim,)
        """Fill-in-the-middle for the folder, or None."""
        self.planner = BlockPlanner(
            shards,
            seq_len,
            seed=seed,
            shuffle=shuffle,
            assignment=assignment,
            packing=packing,
            fim=fim,
            source_seq_len=source_seq_len,
        )
        self._stream = RowStream(self.planner)

    def start(self) -> Position:
        """Return the first row's position."""
        return Position()

    def rows(self, at: Position, count: int) -> tuple[list[Row], Position]:
        """Return the next ``count`` rows, across epoch-block and epoch boundaries, and the position after them.

        Raises ConfigError at the start of a run if rows would cut fill-in-the-middle segments.
        """
        # Check here and not at construction, so that a run started with an older release continues unchanged.
        if not at.rows_consumed and self._packing.fim is not None:
            self._packing.check_fim(self._packing.fim, [self._seq_len])
        rows, tokens, stream = self._stream.take(at.stream, count, self._seq_len)
        return rows, Position(at.rows_consumed + count, at.tokens_consumed + tokens, stream)

    def first_rows(self, most: int) -> list[Row]:
        """Return the first ``most`` rows."""
        return self.rows(self.start(), most)[0]

    def state(self, at: Position) -> dict[str, Any]:
        """Return a position with the values that identify this order."""
        of_pairs = {}
        if self._source_seq_len:
            of_pairs["source_seq_len"] = self._source_seq_len
        return {
            "format": STATE_FORMAT,
            "plan_version": PLAN_VERSION,
            "manifest_hash": self._shards.manifest.hash,
            "seed": self._seed,
            "seq_len": self._seq_len,
            **of_pairs,
            "shuffle": self._shuffle,
            "packing": str(self._packing),
            "num_blocks": self.planner.num_blocks,
            **at.counters,
        }

    def read(self, state: dict[str, Any]) -> Position:
        """Return the position from a state; raise DataError if the state does not fit this order."""
        at = read_position(state, self.state(self.start()), self._shards.folder)
        # Plans the state's epoch block now: a corrupt row index would otherwise fail only at the next step, or read the
        # wrong row.
        if not self._stream.has_row(at.stream):
            raise DataError(
                f"The loader state is damaged: block {at.stream.block} of epoch {at.epoch} has no row "
                f"{at.stream.block_row}."
            )
        return at

    def report(self, at: Position, *, documents: int = 1) -> PackReport:
        """Report rows, padding, cuts and truncation in the current epoch; estimated if it has several epoch blocks.

        Raises ConfigError if the epoch has no row.
        """
        report = self.planner.report(at.epoch, documents=documents)
        if not report.rows:
            raise self.planner.no_rows_error()
        return report
