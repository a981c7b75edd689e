"""Which source the next row of a mixture is of: the one that is furthest behind its share of the tokens.

Integer arithmetic on counters of the whole run, so that every rank of every machine chooses the same. A position's
state is read strictly, as that of one folder is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.mixture.file import Mixture
from data_pipeline.rows.blocks import Stretch
from data_pipeline.rows.order import check_counters, refuse_exclusions
from data_pipeline.rows.pack import Piece, Row
from data_pipeline.rows.stream import BEGINNING, Stream, StreamPosition
from data_pipeline.shards.reader import Corpus
from longctx.errors import DataError
from longctx.untrusted.reading import shown

_OF_STREAM = ("epoch", "epoch_row", "block", "block_row", "row_tokens")
_COUNTERS = ("tokens", "counted", *_OF_STREAM)


@dataclass(frozen=True)
class SourcePosition:
    """Where a mixture stands in one source."""

    stream: StreamPosition = BEGINNING
    tokens: int = 0
    """Taken in all, without padding."""
    counted: int = 0
    """Those that were taken since the shares are what they are."""


@dataclass(frozen=True)
class MixedPosition:
    """Where a loader of a mixture stands between two steps."""

    sources: tuple[SourcePosition, ...]
    rows_consumed: int = 0
    shares: tuple[int, ...] = ()
    """Those by which the last row was chosen; none before the first."""

    @property
    def tokens_consumed(self) -> int:
        """Of all steps, without padding."""
        return sum(source.tokens for source in self.sources)

    @property
    def epoch(self) -> int:
        """That of the source which is least far."""
        return min(source.stream.epoch for source in self.sources)


def source_state(position: SourcePosition, identity: dict[str, Any], share: int | None) -> dict[str, Any]:
    """One source's part of a state. ``identity``: what must be the same for it to mean the same rows."""
    return {
        **identity,
        "share": share,
        "tokens": position.tokens,
        "counted": position.counted,
        **{name: getattr(position.stream, name) for name in _OF_STREAM},
        "before": [[stretch.row_tokens, stretch.rows] for stretch in position.stream.before],
    }


def read_source(entry: Any, identity: dict[str, Any], where: str) -> tuple[SourcePosition, int | None]:
    """A source's position and its share then; DataError for one of other data or of another order, or a damaged one."""
    known = source_state(SourcePosition(), identity, None)
    refuse_exclusions(entry)
    if isinstance(entry, dict):
        # States of releases without it do not name it.
        entry = {"fim": None} | entry
    if not isinstance(entry, dict) or set(entry) != set(known):
        raise DataError(f"The loader state of {where} is damaged: it needs exactly the fields {', '.join(known)}.")
    for name, value in identity.items():
        if entry[name] != value:
            raise DataError(
                f"The loader state of {where} has {name}={shown(entry[name])}, the file {value!r}: its rows would be "
                "others.\nPut back what it was, or give the source another name: it then begins anew."
            )
    counters = {name: entry[name] for name in _COUNTERS}
    if entry["share"] is not None:
        counters["share"] = entry["share"]
    check_counters(counters)
    stream = StreamPosition(
        **{name: counters[name] for name in _OF_STREAM}, before=_read_stretches(entry["before"], where)
    )
    return SourcePosition(stream, entry["tokens"], entry["counted"]), entry["share"]


def _read_stretches(values: Any, where: str) -> tuple[Stretch, ...]:
    """Return what a state says was taken of the block before; DataError if it is damaged."""
    is_list = isinstance(values, list) and all(isinstance(value, list) and len(value) == 2 for value in values)
    if not is_list or not all(type(count) is int and count >= 1 for value in values for count in value):
        raise DataError(
            f"The loader state of {where} is damaged: before={shown(values)} must be pairs of a length and rows."
        )
    return tuple(Stretch(row_tokens, rows) for row_tokens, rows in values)


_WHOLE = 1 << 32
"""Shares are whole numbers of this: powers may differ in their last bit between machines, these do not."""


class Chooser:
    """Takes one row after the other from the streams of a mixture's sources."""

    def __init__(self, mixture: Mixture, corpus: Corpus, streams: Sequence[Stream], seq_len: int, path: Path) -> None:
        """``path`` is for messages."""
        self._mixture, self._corpus, self._streams, self._path = mixture, corpus, streams, path
        self._seq_len = seq_len
        tokens = [shards.num_tokens for shards in corpus.folders]
        self._shares = [_whole(mixture.shares(number, tokens)) for number in range(-1, len(mixture.stages))]

    def shares(self, row: int) -> tuple[int, ...]:
        """Those by which this row of the run is chosen."""
        return self._shares[self._stage(row) + 1]

    def row(self, at: MixedPosition) -> tuple[Row, MixedPosition]:
        """The next row: as many of the stage's as go into one of the run's, laid end to end.

        It has no pieces where every source with a share has given its epochs.
        """
        shares, sources = self.shares(at.rows_consumed), list(at.sources)
        if shares != at.shares:
            # Counted anew: what older shares left is no debt.
            sources = [replace(source, counted=0) for source in sources]
        row_tokens = self._mixture.row_tokens(self._stage(at.rows_consumed), self._seq_len)
        row: list[Piece] = []
        read_in: list[int] = []
        # Padding of each would lie between documents; laid end to end without it, all of it is at the row's end.
        room = self._seq_len // row_tokens
        # The last row of all may be shorter.
        while room and (chosen := self._furthest_behind(shares, sources, row_tokens)) is not None:
            source, epochs = sources[chosen], self._mixture.sources[chosen].epochs
            rows, taken, stream = self._streams[chosen].take(source.stream, 1, row_tokens, epochs=epochs)
            # Without a row its last epoch ended in blocks that have none: it is used up now.
            room -= len(rows)
            sources[chosen] = SourcePosition(stream, source.tokens + taken, source.counted + taken)
            first = self._corpus.first_document[chosen]
            for found in rows:
                row += [(first + document, start, stop) for document, start, stop in found]
                read_in += found.epochs
        mixed = Row.of(row)
        mixed.epochs = read_in
        return mixed, MixedPosition(tuple(sources), at.rows_consumed + 1, shares)

    def _furthest_behind(self, shares: Sequence[int], sources: Sequence[SourcePosition], row_tokens: int) -> int | None:
        """The source that the next row is of; None where all have given their epochs."""
        live = [n for n in range(len(sources)) if shares[n] and not self._is_used_up(n, sources[n])]
        whole = sum(shares[n] for n in live)
        tokens = sum(sources[n].counted for n in live) + row_tokens
        # Of those that are equally far behind, the first.
        return max(live, key=lambda n: shares[n] * tokens - sources[n].counted * whole, default=None)

    def _stage(self, row: int) -> int:
        return self._mixture.stage_at(row * self._seq_len)

    def _is_used_up(self, number: int, source: SourcePosition) -> bool:
        epochs = self._mixture.sources[number].epochs
        return epochs is not None and source.stream.epoch >= epochs

    def used_up(self, at: MixedPosition) -> DataError:
        """What is wrong where there are no more rows."""
        given = ", ".join(
            f"{source.name} {position.stream.epoch}"
            for source, position in zip(self._mixture.sources, at.sources, strict=True)
        )
        return DataError(
            f"{self._path} is used up after {at.rows_consumed:,} rows of {self._seq_len:,} tokens: every source with a "
            f"weight has given its epochs ({given}).\nRaise epochs there, or take fewer train.steps."
        )


def _whole(shares: Sequence[float]) -> tuple[int, ...]:
    """Shares as whole numbers; what has one at all, has at least 1."""
    return tuple(max(1, round(share * _WHOLE)) if share else 0 for share in shares)
