"""Source selection for a mixture's next row: the source with the largest token deficit.

Uses integer arithmetic on global counters, so that every rank on every machine makes the same choice. A position's
state is validated as strictly as for a single folder.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.mixture.file import Mixture
from data_pipeline.rows.epoch_blocks import TakenRows
from data_pipeline.rows.order import check_counters, refuse_exclusions
from data_pipeline.rows.pack import Piece, Row
from data_pipeline.rows.row_stream import START, RowStream, StreamPosition
from data_pipeline.shards.reader import Corpus
from longctx.errors import DataError
from longctx.untrusted.strict_json import shown

_OF_STREAM = ("epoch", "epoch_row", "block", "block_row", "row_tokens")
_COUNTERS = ("tokens", "counted", *_OF_STREAM)


@dataclass(frozen=True)
class SourcePosition:
    """Position within one source."""

    stream: StreamPosition = START
    tokens: int = 0
    """Tokens taken in total, without padding."""
    tokens_since_reset: int = 0
    """Tokens taken since the current token shares took effect."""


@dataclass(frozen=True)
class MixedPosition:
    """Loader position between two steps."""

    sources: tuple[SourcePosition, ...]
    rows_consumed: int = 0
    shares: tuple[int, ...] = ()
    """Integer token shares that selected the last row; empty before the first row."""

    @property
    def tokens_consumed(self) -> int:
        """Tokens in all steps, without padding."""
        return sum(source.tokens for source in self.sources)

    @property
    def epoch(self) -> int:
        """Epoch of the least advanced source."""
        return min(source.stream.epoch for source in self.sources)


def source_state(position: SourcePosition, identity: dict[str, Any], share: int | None) -> dict[str, Any]:
    """Return one source's state entry; ``identity`` holds the values that must match when it is loaded."""
    return {
        **identity,
        "share": share,
        "tokens": position.tokens,
        "counted": position.tokens_since_reset,
        **{name: getattr(position.stream, name) for name in _OF_STREAM},
        "before": [[taken_rows.row_tokens, taken_rows.rows] for taken_rows in position.stream.before],
    }


def read_source(entry: Any, identity: dict[str, Any], where: str) -> tuple[SourcePosition, int | None]:
    """Return a source's position and its token share when the state was saved.

    Raises DataError if the entry is damaged or belongs to other data or another row order.
    """
    known = source_state(SourcePosition(), identity, None)
    refuse_exclusions(entry)
    if isinstance(entry, dict):
        # States from older releases lack the field.
        entry = {"fim": None} | entry
    if not isinstance(entry, dict) or set(entry) != set(known):
        raise DataError(f"The loader state of {where} is damaged: expected exactly the fields {', '.join(known)}.")
    for name, value in identity.items():
        if entry[name] != value:
            raise DataError(
                f"The loader state of {where} has {name}={shown(entry[name])}, but the mixture has {value!r}: its "
                "row order would change.\nRestore the saved value, or rename the source to start it from its first row."
            )
    counters = {name: entry[name] for name in _COUNTERS}
    if entry["share"] is not None:
        counters["share"] = entry["share"]
    check_counters(counters)
    stream = StreamPosition(
        **{name: counters[name] for name in _OF_STREAM}, before=_read_taken_rows(entry["before"], where)
    )
    return SourcePosition(stream, entry["tokens"], entry["counted"]), entry["share"]


def _read_taken_rows(values: Any, where: str) -> tuple[TakenRows, ...]:
    """Return the rows taken from this epoch block at other lengths; raise DataError if the entry is damaged."""
    is_list = isinstance(values, list) and all(isinstance(value, list) and len(value) == 2 for value in values)
    if not is_list or not all(type(count) is int and count >= 1 for value in values for count in value):
        raise DataError(
            f"The loader state of {where} is damaged: before={shown(values)} must contain pairs of row length and "
            "row count."
        )
    return tuple(TakenRows(row_tokens, rows) for row_tokens, rows in values)


_WHOLE = 1 << 32
"""Denominator for integer shares: float powers may differ in their last bit between machines, the integers do not."""


# Deficit-based mixture order. Given target shares w_i (integers, W = Σ w_i over sources that are not used up), tokens
# c_i taken since the shares took effect, and row length r, the next row comes from the source with the largest
#
#     w_i · (Σ c + r) − c_i · W
#
# This is its token deficit scaled by W to stay an integer. Each choice reduces the largest deficit, so realized shares
# stay within a few rows of their targets throughout the run, unlike random sampling, whose error grows with the square
# root of the row count. The order is a pure function of the counters: it needs no random state in checkpoints, and
# every rank computes the same order.
class Chooser:
    """Selects the next row from the source streams."""

    def __init__(
        self, mixture: Mixture, corpus: Corpus, streams: Sequence[RowStream], seq_len: int, path: Path
    ) -> None:
        """Initialize; ``path`` is used in error messages."""
        self._mixture, self._corpus, self._streams, self._path = mixture, corpus, streams, path
        self._seq_len = seq_len
        tokens = [shards.num_tokens for shards in corpus.folders]
        self._shares = [_whole(mixture.shares(number, tokens)) for number in range(-1, len(mixture.stages))]

    def shares(self, row: int) -> tuple[int, ...]:
        """Return the token shares that select this row."""
        return self._shares[self._stage(row) + 1]

    def row(self, at: MixedPosition) -> tuple[Row, MixedPosition]:
        """Return the training run's next row, a concatenation of as many stage rows as fit.

        The row is empty if every source with a positive share has reached its epoch limit.
        """
        shares, sources = self.shares(at.rows_consumed), list(at.sources)
        if shares != at.shares:
            # Restart the counts: a deficit under the old shares does not carry over.
            sources = [replace(source, tokens_since_reset=0) for source in sources]
        row_tokens = self._mixture.row_tokens(self._stage(at.rows_consumed), self._seq_len)
        row: list[Piece] = []
        read_in: list[int] = []
        # Concatenate rows without their own padding, so that all padding is at the end of the run's row.
        remaining_rows = self._seq_len // row_tokens
        # The run's last row may be shorter.
        while remaining_rows and (chosen := self._largest_deficit(shares, sources, row_tokens)) is not None:
            source, epochs = sources[chosen], self._mixture.sources[chosen].epochs
            rows, taken, stream = self._streams[chosen].take(source.stream, 1, row_tokens, epochs=epochs)
            # No row means that the source's last epoch ended in empty epoch blocks; the source is now used up.
            remaining_rows -= len(rows)
            sources[chosen] = SourcePosition(stream, source.tokens + taken, source.tokens_since_reset + taken)
            first = self._corpus.first_document[chosen]
            for found in rows:
                row += [(first + document, start, stop) for document, start, stop in found]
                read_in += found.epochs
        mixed = Row.of(row)
        mixed.epochs = read_in
        return mixed, MixedPosition(tuple(sources), at.rows_consumed + 1, shares)

    def _largest_deficit(self, shares: Sequence[int], sources: Sequence[SourcePosition], row_tokens: int) -> int | None:
        """Return the next row's source; None if all sources have reached their epoch limits."""
        live = [n for n in range(len(sources)) if shares[n] and not self._is_used_up(n, sources[n])]
        whole = sum(shares[n] for n in live)
        # Include the row about to be taken, so that the targets refer to the totals after it.
        tokens = sum(sources[n].tokens_since_reset for n in live) + row_tokens
        # Ties go to the source listed first.
        return max(live, key=lambda n: shares[n] * tokens - sources[n].tokens_since_reset * whole, default=None)

    def _stage(self, row: int) -> int:
        return self._mixture.stage_at(row * self._seq_len)

    def _is_used_up(self, number: int, source: SourcePosition) -> bool:
        epochs = self._mixture.sources[number].epochs
        return epochs is not None and source.stream.epoch >= epochs

    def used_up(self, at: MixedPosition) -> DataError:
        """Build the error for a mixture without remaining rows."""
        given = ", ".join(
            f"{source.name} {position.stream.epoch}"
            for source, position in zip(self._mixture.sources, at.sources, strict=True)
        )
        return DataError(
            f"{self._path} is exhausted after {at.rows_consumed:,} rows of {self._seq_len:,} tokens: every source with "
            f"a weight has reached its epoch limit ({given}).\nRaise epochs in the mixture, or reduce train.steps."
        )


def _whole(shares: Sequence[float]) -> tuple[int, ...]:
    """Convert shares to integers; a positive share is at least 1."""
    return tuple(max(1, round(share * _WHOLE)) if share else 0 for share in shares)
