"""The order of rows of a mixture: each row is of the source that is furthest behind its share (``mixture.choose``).

A row is packed from the documents of one source, and every source is a stream of its own (``rows.stream``). So a share
may change at any row, in the file and in mid-run, and no source loses or repeats a document.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.mixture.choose import Chooser
from data_pipeline.mixture.file import Mixture
from data_pipeline.mixture.forecast import Forecast, forecast
from data_pipeline.mixture.position import MixedPosition, SourcePosition, read_source, source_state
from data_pipeline.rows.blocks import PLAN_VERSION, BlockPlanner, PackReport
from data_pipeline.rows.change import WhenChanged, settled
from data_pipeline.rows.fim import fim_of, rule_of
from data_pipeline.rows.pack import BEST_FIT, Packing
from data_pipeline.rows.position import STATE_FORMAT, check_counters
from data_pipeline.rows.row import Row
from data_pipeline.rows.stream import Stream
from data_pipeline.shards.corpus import Corpus
from data_pipeline.shuffle import key64
from longctx.errors import DataError
from longctx.untrusted.reading import shown

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
        planners = _planners(mixture, corpus, seq_len, seed=seed, shuffle=shuffle, packing=packing)
        self._streams = [Stream(planner) for planner in planners]
        self.fims = [stream.planner.fim for stream in self._streams]
        self._chooser = Chooser(mixture, corpus, self._streams, seq_len, path)
        self._resting: dict[str, Any] = {}
        """Positions of sources that the file no longer has: they may come back."""

    def start(self) -> MixedPosition:
        """The position of the first row."""
        return MixedPosition(tuple(SourcePosition(stream.start()) for stream in self._streams))

    def rows(self, at: MixedPosition, count: int) -> tuple[list[Row], MixedPosition]:
        """The next ``count`` rows; DataError where every source has given all its epochs."""
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
            sources[source.name] = source_state(position, self._identity(number), share)
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

    def read(self, state: dict[str, Any], *, when_changed: WhenChanged = "refuse") -> MixedPosition:
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
            position, share = SourcePosition(self._streams[number].start()), None
            if source.name in resting:
                position, share = self._read_source(number, resting.pop(source.name), when_changed)
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

    def _identity(self, number: int) -> dict[str, Any]:
        """What must be the same for a source's position to mean the same rows."""
        planner = self._streams[number].planner
        return {
            "manifest_hash": self._corpus.folders[number].manifest.hash,
            "num_blocks": planner.num_blocks,
            "upsample": [[rule.min_tokens, rule.factor] for rule in self._mixture.sources[number].upsample],
            "fim": rule_of(planner.fim),
        }

    def _read_source(self, number: int, entry: Any, when_changed: WhenChanged) -> tuple[SourcePosition, int | None]:
        name, num_shards = self._mixture.sources[number].name, len(self._corpus.folders[number].manifest.shards)
        position, share = read_source(entry, self._identity(number), f"source {name!r} of {self._path}", num_shards)
        at = settled(position.stream, self._streams[number].planner, when_changed)
        position = replace(position, stream=at)
        if not self._streams[number].has_row(at):
            raise DataError(
                f"The loader state of source {name!r} of {self._path} is damaged: block {at.block} of epoch {at.epoch} "
                f"has no row {at.block_row}."
            )
        return position, share


def _planners(
    mixture: Mixture, corpus: Corpus, seq_len: int, *, seed: int, shuffle: bool, packing: Packing
) -> Iterator[BlockPlanner]:
    """Yield what plans the rows of each source."""
    for source, shards in zip(mixture.sources, corpus.folders, strict=True):
        own = source_seed(seed, source.name)
        fim = fim_of(source.fim_rule(packing.fim), shards.tokenizer, seed=own, seq_len=seq_len)
        options = {"seed": own, "shuffle": shuffle, "packing": packing, "upsample": source.upsample, "fim": fim}
        yield BlockPlanner(shards, seq_len, **options)


def source_seed(seed: int, name: str) -> int:
    """The seed of a source: by its name, so that others may come and go, and two with equal counts differ."""
    return key64(seed, xxhash.xxh3_64_intdigest(name.encode()))


def _percentages(mixture: Mixture, shares: Sequence[int]) -> str:
    """Every source with its share."""
    pairs = zip(mixture.sources, shares, strict=True)
    return ", ".join(f"{source.name} {share / sum(shares):.1%}" for source, share in pairs)
