"""Row order in a mixture: each row comes from the source with the largest token deficit (``mixture.choose``).

A row is packed from one source's documents, and every source has its own stream (``rows.row_stream``). So token shares
may change at any row, in the file or during a run, and sources never lose or repeat a document.
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
from data_pipeline.rows.epoch_blocks import PLAN_VERSION, PackReport
from data_pipeline.rows.order import STATE_FORMAT, check_counters
from data_pipeline.rows.pack import BEST_FIT, Packing, Row
from data_pipeline.shards.reader import Corpus
from longctx.errors import DataError
from longctx.untrusted.strict_json import shown


@dataclass(frozen=True, kw_only=True)
class SourceEstimate:
    """Estimated usage for one source."""

    name: str
    tokens: float
    """Tokens taken by the end of the run."""
    epochs: float
    """Epochs completed by then; one epoch includes upsampling."""


@dataclass(frozen=True, kw_only=True)
class MixtureEstimate:
    """Estimated tokens that a run takes from a mixture. Rows count as full, because padding is not known in advance."""

    sources: list[SourceEstimate]
    missing_tokens: float
    """Tokens that no source can supply by the end of the run; 0 if the mixture is not used up."""


def estimate_usage(
    mixture: Mixture, taken: Sequence[int], epoch_tokens: Sequence[int], *, begin: int, end: int
) -> MixtureEstimate:
    """Estimate source usage while the run advances from token ``begin`` to token ``end``.

    ``taken`` holds the tokens already taken per source, ``epoch_tokens`` the tokens per epoch and source.
    """
    tokens = [float(count) for count in taken]
    limits = [
        float("inf") if source.epochs is None else float(source.epochs * count)
        for source, count in zip(mixture.sources, epoch_tokens, strict=True)
    ]
    ends = [stage.from_tokens for stage in mixture.stages if begin < stage.from_tokens < end]
    missing, at = 0.0, float(begin)
    # Between two stage starts the token shares are constant until a source is used up, so advance from one such event
    # to the next.
    for until in (*ends, end):
        shares = mixture.shares(mixture.stage_at(int(at)), epoch_tokens)
        while until > at:
            live = [n for n, share in enumerate(shares) if share and tokens[n] < limits[n]]
            if not live:
                missing += until - at
                break
            whole = sum(shares[n] for n in live)
            # Advance to the end of the stage, or until the first source reaches its epoch limit.
            step = min(until - at, *((limits[n] - tokens[n]) * whole / shares[n] for n in live))
            for n in live:
                tokens[n] = min(tokens[n] + step * shares[n] / whole, limits[n])
                if limits[n] - tokens[n] < 0.5:
                    tokens[n] = limits[n]
            at += step
        at = float(until)
    sources = [
        SourceEstimate(name=source.name, tokens=tokens[n], epochs=tokens[n] / max(epoch_tokens[n], 1))
        for n, source in enumerate(mixture.sources)
    ]
    return MixtureEstimate(sources=sources, missing_tokens=missing)


log = logging.getLogger(__name__)


class MixedOrder:
    """Row order over several shard folders."""

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
        """Initialize; ``corpus`` has the sources' folders in order, and ``path`` is used in error messages."""
        mixture.check_lengths(seq_len, path)
        self._mixture, self._corpus, self._path = mixture, corpus, path
        self._seq_len, self._seed, self._shuffle, self._packing = seq_len, seed, shuffle, packing
        options = {"seed": seed, "shuffle": shuffle, "packing": packing}
        self._of_sources = SourceStreams(mixture, corpus, seq_len, path=path, **options)
        self._streams, self.fim_by_folder = self._of_sources.streams, self._of_sources.fim_by_source
        self._chooser = Chooser(mixture, corpus, self._streams, seq_len, path)
        self._resting: dict[str, Any] = {}
        """Positions of sources that are no longer in the file: they may return."""

    def start(self) -> MixedPosition:
        """Return the first row's position."""
        return MixedPosition(tuple(SourcePosition() for _ in self._streams))

    def rows(self, at: MixedPosition, count: int) -> tuple[list[Row], MixedPosition]:
        """Return the next ``count`` rows and the position after them; raise DataError if every source is used up.

        Raises ConfigError at the start of a run if rows would cut fill-in-the-middle segments.
        """
        # Check here and not at construction, so that a run started with an older release continues unchanged.
        if not at.rows_consumed:
            self._of_sources.check_rows()
        # One row at a time: each row changes the deficits that select the next one.
        rows: list[Row] = []
        for _ in range(count):
            row, next_position = self._chooser.row(at)
            if not row:
                raise self._chooser.used_up(at)
            rows.append(row)
            at = next_position
        return rows, at

    def first_rows(self, most: int | None) -> list[Row]:
        """Return the first ``most`` rows; without a limit, all rows until every source is used up."""
        rows: list[Row] = []
        at = self.start()
        while most is None or len(rows) < most:
            row, at = self._chooser.row(at)
            if not row:
                break
            rows.append(row)
        return rows

    def state(self, at: MixedPosition) -> dict[str, Any]:
        """Return a position with the values that identify this order."""
        # Keep sources that left the file: they resume at their position when they return.
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
        """Return the position from a state.

        Weights, stages and the list of sources may have changed since the state was saved. Raises DataError if a saved
        source's data has changed or is read in another order.
        """
        wanted = self.state(self.start())
        if not isinstance(state, dict) or set(state) != set(wanted) or not isinstance(state["sources"], dict):
            raise DataError(
                f"The loader state does not belong to a mixture, but {self._path} is one. Resume with the original "
                "run's data.train, or start a new run from the weights (run.start_from)."
            )
        for name in ("format", "plan_version", "seed", "seq_len", "shuffle", "packing"):
            if state[name] != wanted[name]:
                raise DataError(
                    f"The loader state has {name}={shown(state[name])}, but this run has {wanted[name]!r} "
                    f"({self._path}).\nResume with the same seed, seq_len, packing and shuffle, or start a new run "
                    "from the weights (run.start_from)."
                )
        check_counters({"rows_consumed": state["rows_consumed"]})
        # A source missing from the state starts at its first row.
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
        # Token shares have another meaning if the sources differ: restart the counts.
        known = tuple(share for share in shares if share is not None)
        at = MixedPosition(tuple(found), state["rows_consumed"])
        if len(known) == len(shares) and not resting:
            at = replace(at, shares=known)
        now = self._chooser.shares(max(at.rows_consumed - 1, 0))
        if at.rows_consumed and now != at.shares:
            shares_now = _percentages(self._mixture, now)
            log.info("%s: source shares differ from the checkpoint's; from this step on: %s.", self._path, shares_now)
        return at

    def estimate_usage(self, at: MixedPosition, rows: int) -> MixtureEstimate:
        """Estimate each source's usage over the ``rows`` rows after a position."""
        taken = [source.tokens for source in at.sources]
        epochs = [report.tokens for report in self._reports(at)]
        begin = at.rows_consumed * self._seq_len
        return estimate_usage(self._mixture, taken, epochs, begin=begin, end=begin + rows * self._seq_len)

    def report(self, at: MixedPosition, *, documents: int = 1) -> PackReport:
        """Return one combined pack report over an epoch in every source, in rows of the run's length."""
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
    pairs = zip(mixture.sources, shares, strict=True)
    return ", ".join(f"{source.name} {share / sum(shares):.1%}" for source, share in pairs)
