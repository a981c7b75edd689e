"""The order of a run's rows: which documents stand in row n of all, for any number of ranks. Here that of one folder.

``data_pipeline.mixture.order`` has that of several. An order holds no position: the loader has one, and asks for what
follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from data_pipeline.rows.blocks import PLAN_VERSION, BlockPlanner, Deal, PackReport
from data_pipeline.rows.fim import Fim, fim_of
from data_pipeline.rows.pack import BEST_FIT, Packing
from data_pipeline.rows.position import STATE_FORMAT, Position, read_position
from data_pipeline.rows.row import Row
from data_pipeline.rows.stream import Stream
from data_pipeline.shards.reader import ShardSet
from longctx.errors import DataError


class OrderPosition(Protocol):
    """Where a loader stands between two steps."""

    @property
    def rows_consumed(self) -> int:
        """Rows of all steps and ranks."""
        ...

    @property
    def tokens_consumed(self) -> int:
        """Their tokens, without padding."""
        ...

    @property
    def epoch(self) -> int:
        """The epoch of the next row, from 0; with several folders that of the one which is least far."""
        ...


class Order(Protocol):
    """What a loader reads rows by. Positions are this order's own."""

    @property
    def fims(self) -> Sequence[Fim | None]:
        """How the documents of each folder are filled in in their middle; None where they are read as they are."""
        ...

    def start(self) -> Any:
        """The position of the first row."""
        ...

    def rows(self, at: Any, count: int) -> tuple[list[Row], Any]:
        """The next ``count`` rows, and the position behind them; DataError where there are no more."""
        ...

    def first_rows(self, most: int) -> list[Row]:
        """The first rows, at most so many; fewer where there are no more."""
        ...

    def state(self, at: Any) -> dict[str, Any]:
        """A position as plain JSON, with all that must be the same for it to mean the same rows."""
        ...

    def read(self, state: dict[str, Any]) -> Any:
        """The position that a state names; DataError for one of other data or of another order."""
        ...

    def report(self, at: Any, *, documents: int = 1) -> PackReport:
        """What packing costs in the epoch under way, judged by at least so many documents."""
        ...


class FolderOrder:
    """The rows of one shard folder."""

    def __init__(
        self,
        shards: ShardSet,
        seq_len: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        deal: Deal | None = None,
        packing: Packing = BEST_FIT,
    ) -> None:
        """``deal`` is that of the folder unless it is given."""
        self._shards, self._seq_len, self._seed, self._shuffle = shards, seq_len, seed, shuffle
        self._packing = packing
        fim = fim_of(packing.fim, shards.tokenizer, seed=seed, seq_len=seq_len)
        self.fims = (fim,)
        """How its documents are filled in in their middle, if they are."""
        self.planner = BlockPlanner(shards, seq_len, seed=seed, shuffle=shuffle, deal=deal, packing=packing, fim=fim)
        self._stream = Stream(self.planner)

    def start(self) -> Position:
        """The position of the first row."""
        return Position()

    def rows(self, at: Position, count: int) -> tuple[list[Row], Position]:
        """The next ``count`` rows, across as many blocks and epochs as they take.

        ConfigError for the first rows of a run that would cut what it fills in.
        """
        # Here and not when the order is made: a run that an older release began so goes on as it began.
        if not at.rows_consumed and self._packing.fim is not None:
            self._packing.check_fim(self._packing.fim, [self._seq_len])
        rows, tokens, stream = self._stream.take(at.stream, count, self._seq_len)
        return rows, Position(at.rows_consumed + count, at.tokens_consumed + tokens, stream)

    def first_rows(self, most: int) -> list[Row]:
        """The first rows."""
        return self.rows(self.start(), most)[0]

    def state(self, at: Position) -> dict[str, Any]:
        """A position, and what makes it one of this order."""
        return {
            "format": STATE_FORMAT,
            "plan_version": PLAN_VERSION,
            "manifest_hash": self._shards.manifest.hash,
            "seed": self._seed,
            "seq_len": self._seq_len,
            "shuffle": self._shuffle,
            "packing": str(self._packing),
            "num_blocks": self.planner.num_blocks,
            **at.counters,
        }

    def read(self, state: dict[str, Any]) -> Position:
        """The position that a state names."""
        at = read_position(state, self.state(self.start()), self._shards.folder)
        if not self._stream.has_row(at.stream):
            raise DataError(
                f"The loader state is damaged: block {at.stream.block} of epoch {at.epoch} has no row "
                f"{at.stream.block_row}."
            )
        return at

    def report(self, at: Position, *, documents: int = 1) -> PackReport:
        """Rows, padding, cuts and truncation of the epoch under way: an estimate where it has several blocks."""
        return self.planner.report(at.epoch, documents=documents)
