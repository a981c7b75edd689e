"""The order of rows of a mixture: each row is of the source that is furthest behind its share (``mixture.choose``).

A row is packed from the documents of one source, and every source is a stream of its own (``rows.stream``). So a share
may change at any row, in the file and in mid-run, and no source loses or repeats a document.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_pipeline.mixture.choose import Chooser, MixedPosition, SourcePosition, read_source, source_state
from data_pipeline.mixture.file import Mixture
from data_pipeline.mixture.streams import SourceStreams
from data_pipeline.rows.blocks import PLAN_VERSION, PackReport
from data_pipeline.rows.order import STATE_FORMAT, check_counters
from data_pipeline.rows.pack import BEST_FIT, Packing, Row
from data_pipeline.shards.reader import Corpus
from longctx.errors import DataError
from longctx.untrusted.reading import shown


@dataclass(frozen=True, kw_only=True)
class SourceForecast:
    """One source of a run."""

    name: str
    tokens: float
    """Those that the run will have taken at its end."""
    epochs: float
    """How often that is all the source has, upsampling counted."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What a run takes of a mixture. Rows count as full: what padding takes is not known before."""

    sources: list[SourceForecast]
    missing_tokens: float
    """What no source has left at the end of the run; 0 where it is not used up."""


def forecast(mixture: Mixture, taken: Sequence[int], epoch_tokens: Sequence[int], *, begin: int, end: int) -> Forecast:
    """That of the run's tokens from ``begin`` to ``end``.

    ``taken`` are the tokens of each source that came before, ``epoch_tokens`` those of an epoch of it.
    """
    tokens = [float(count) for count in taken]
    limits = [
        float("inf") if source.epochs is None else float(source.epochs * count)
        for source, count in zip(mixture.sources, epoch_tokens, strict=True)
    ]
    ends = [stage.from_tokens for stage in mixture.stages if begin < stage.from_tokens < end]
    missing, at = 0.0, float(begin)
    # Between two ends shares are what they are, until a source has given all it has.
    for until in (*ends, end):
        shares = mixture.shares(mixture.stage_at(int(at)), epoch_tokens)
        while until > at:
            live = [n for n, share in enumerate(shares) if share and tokens[n] < limits[n]]
            if not live:
                missing += until - at
                break
            whole = sum(shares[n] for n in live)
            # To the end of the stage, or until the first of them has given its epochs.
            step = min(until - at, *((limits[n] - tokens[n]) * whole / shares[n] for n in live))
            for n in live:
                tokens[n] = min(tokens[n] + step * shares[n] / whole, limits[n])
                if limits[n] - tokens[n] < 0.5:
                    tokens[n] = limits[n]
            at += step
        at = float(until)
    sources = [
        SourceForecast(name=source.name, tokens=tokens[n], epochs=tokens[n] / max(epoch_tokens[n], 1))
        for n, source in enumerate(mixture.sources)
    ]
    return Forecast(sources=sources, missing_tokens=missing)


log = logging.getLogger(__name__)


class MixedOrder:
    """The rows of several shard folders."""

    def __init__(
        self,
        mixture: Mixture,
        corpus: Corpus,
        seq_len: int,
        *,
        path: Path,
        seed: int = 0,
        shuffle: bool = True,
        packing: Packing = BEST_FIT,
    ) -> None:
        """``corpus`` has the folders of the mixture's sources, in their order. ``path`` is for messages."""
        mixture.check_lengths(seq_len, path)
        self._mixture, self._corpus, self._path = mixture, corpus, path
        self._seq_len, self._seed, self._shuffle, self._packing = seq_len, seed, shuffle, packing
        options = {"seed": seed, "shuffle": shuffle, "packing": packing}
        self._of_sources = SourceStreams(mixture, corpus, seq_len, path=path, **options)
        self._streams, self.fims = self._of_sources.streams, self._of_sources.fims
        self._chooser = Chooser(mixture, corpus, self._streams, seq_len, path)
        self._resting: dict[str, Any] = {}
        """Positions of sources that the file no longer has: they may come back."""

    def start(self) -> MixedPosition:
        """The position of the first row."""
        return MixedPosition(tuple(SourcePosition() for _ in self._streams))

    def rows(self, at: MixedPosition, count: int) -> tuple[list[Row], MixedPosition]:
        """The next ``count`` rows; DataError where every source has given all its epochs.

        ConfigError for the first rows of a run that would cut what it fills in.
        """
        # Here and not when the order is made: a run that an older release began so goes on as it began.
        if not at.rows_consumed:
            self._of_sources.check_rows()
        # One at a time: the row before decides which source is furthest behind.
        rows: list[Row] = []
        for _ in range(count):
            row, behind = self._chooser.row(at)
            if not row:
                raise self._chooser.used_up(at)
            rows.append(row)
            at = behind
        return rows, at

    def first_rows(self, most: int | None) -> list[Row]:
        """The first rows, at most so many, or all until every source has given its epochs."""
        rows: list[Row] = []
        at = self.start()
        while most is None or len(rows) < most:
            row, at = self._chooser.row(at)
            if not row:
                break
            rows.append(row)
        return rows

    def state(self, at: MixedPosition) -> dict[str, Any]:
        """A position, and what makes it one of this order."""
        # Also of those that rest: they go on where they stood when the file has them again.
        sources = dict(self._resting)
        for number, (source, position) in enumerate(zip(self._mixture.sources, at.sources, strict=True)):
            share = None
            if at.shares:
                share = at.shares[number]
            sources[source.name] = source_state(position, self._of_sources.identity(number), share)
        return {
            "format": STATE_FORMAT,
            "plan_version": PLAN_VERSION,
            "seed": self._seed,
            "seq_len": self._seq_len,
            "shuffle": self._shuffle,
            "packing": str(self._packing),
            "rows_consumed": at.rows_consumed,
            "sources": sources,
        }

    def read(self, state: dict[str, Any]) -> MixedPosition:
        """The position that a state names. The file may have other weights, stages and sources than when it was taken.

        DataError where a source that it names is other data by now, or is read in another order.
        """
        wanted = self.state(self.start())
        if not isinstance(state, dict) or set(state) != set(wanted) or not isinstance(state["sources"], dict):
            raise DataError(
                f"The loader state is not one of a mixture, as {self._path} is. Resume with the data.train of the run "
                "that wrote it, or start without the state (run.start_from)."
            )
        for name in ("format", "plan_version", "seed", "seq_len", "shuffle", "packing"):
            if state[name] != wanted[name]:
                raise DataError(
                    f"The loader state has {name}={shown(state[name])}, this run {wanted[name]!r} ({self._path}).\n"
                    "Resume with the same seed, seq_len, packing and shuffle, or start without the state."
                )
        check_counters({"rows_consumed": state["rows_consumed"]})
        # A source that the state does not have begins at its first row.
        resting = dict(state["sources"])
        found: list[SourcePosition] = []
        shares: list[int | None] = []
        for number, source in enumerate(self._mixture.sources):
            position, share = SourcePosition(), None
            if source.name in resting:
                position, share = self._read_source(number, resting.pop(source.name))
            found.append(position)
            shares.append(share)
        self._resting = resting
        # With other sources than before, shares mean something else: count anew.
        known = tuple(share for share in shares if share is not None)
        at = MixedPosition(tuple(found), state["rows_consumed"])
        if len(known) == len(shares) and not resting:
            at = replace(at, shares=known)
        now = self._chooser.shares(max(at.rows_consumed - 1, 0))
        if at.rows_consumed and now != at.shares:
            shares_now = _percentages(self._mixture, now)
            log.info("%s has other shares than the run before: %s, counted from here on.", self._path, shares_now)
        return at

    def forecast(self, at: MixedPosition, rows: int) -> Forecast:
        """What so many rows behind a position will take of each source."""
        taken = [source.tokens for source in at.sources]
        epochs = [report.tokens for report in self._reports(at)]
        begin = at.rows_consumed * self._seq_len
        return forecast(self._mixture, taken, epochs, begin=begin, end=begin + rows * self._seq_len)

    def report(self, at: MixedPosition, *, documents: int = 1) -> PackReport:
        """One epoch of every source together, in rows of the run's length."""
        return PackReport.together(self._reports(at, documents), self._seq_len)

    def _reports(self, at: MixedPosition, documents: int = 1) -> list[PackReport]:
        return [
            stream.planner.report(source.stream.epoch, documents=documents)
            for stream, source in zip(self._streams, at.sources, strict=True)
        ]

    def _read_source(self, number: int, entry: Any) -> tuple[SourcePosition, int | None]:
        name = self._mixture.sources[number].name
        self._of_sources.take_segments(number, entry)
        identity = self._of_sources.identity(number)
        position, share = read_source(entry, identity, f"source {name!r} of {self._path}")
        at = position.stream
        if not self._streams[number].has_row(at):
            raise DataError(
                f"The loader state of source {name!r} of {self._path} is damaged: block {at.block} of epoch {at.epoch} "
                f"has no row {at.block_row}."
            )
        return position, share


def _percentages(mixture: Mixture, shares: Sequence[int]) -> str:
    """Every source with its share."""
    pairs = zip(mixture.sources, shares, strict=True)
    return ", ".join(f"{source.name} {share / sum(shares):.1%}" for source, share in pairs)
