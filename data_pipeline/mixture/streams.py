"""Packed-row streams for a mixture's sources, each with its fill-in-the-middle rule.

Stages have different row lengths, and every row must end between fill-in-the-middle segments (``rows.fim``). So the
segment length follows from all stages, and a resumed run keeps the segments it started with.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import xxhash

from data_pipeline.mixture.file import Mixture
from data_pipeline.rows.epoch_blocks import BlockPlanner
from data_pipeline.rows.fim import FimRule, fim_of, rule_of
from data_pipeline.rows.pack import Packing
from data_pipeline.rows.row_stream import RowStream
from data_pipeline.shards.reader import Corpus
from data_pipeline.shuffle import key64
from longctx.errors import ConfigError, DataError

log = logging.getLogger(__name__)


class SourceStreams:
    """A mixture's source streams, in file order."""

    def __init__(
        self,
        mixture: Mixture,
        corpus: Corpus,
        seq_len: int,
        *,
        path: Path,
        seed: int,
        shuffle: bool,
        packing: Packing,
    ) -> None:
        """Build each source's stream; ``path`` is used in error messages."""
        self._mixture, self._corpus, self._path = mixture, corpus, path
        self._seq_len, self._seed, self._shuffle, self._packing = seq_len, seed, shuffle, packing
        self._row_lengths = mixture.row_lengths(seq_len)
        self._rules = [source.fim_rule(packing.fim) for source in mixture.sources]
        self._too_short: ConfigError | None = None
        self.streams = [self._begin(number) for number in range(len(mixture.sources))]
        """One stream per source; ``take_segments`` may replace one."""
        self.fim_by_source = [stream.planner.fim for stream in self.streams]
        """Fill-in-the-middle per source; None for a source that is read unchanged."""

    def check_rows(self) -> None:
        """Raise ConfigError if some rows would cut fill-in-the-middle segments or make them too short."""
        if self._too_short is not None:
            raise self._too_short
        for rule in filter(None, self._rules):
            self._packing.check_fim(rule, self._row_lengths)

    def identity(self, number: int) -> dict[str, Any]:
        """Return the values that must match for a source's position to refer to the same rows."""
        # Weights and stages are absent: they change the order between sources, not a source's rows.
        planner = self.streams[number].planner
        return {
            "manifest_hash": self._corpus.folders[number].manifest.hash,
            "num_blocks": planner.num_blocks,
            "upsample": [[rule.min_tokens, rule.factor] for rule in self._mixture.sources[number].upsample],
            "fim": rule_of(planner.fim),
        }

    def take_segments(self, number: int, entry: Any) -> None:
        """Adopt the fill-in-the-middle segments from a source's state: others would change the rows at a position.

        Raises DataError if rows in a later stage would cut these segments.
        """
        source = self._mixture.sources[number]
        requested, saved_rule = source.fim_rule(self._packing.fim), None
        if isinstance(entry, dict):
            saved_rule = entry.get("fim")
        # Segments that the run sets itself must equal the state's, like everything that determines its rows.
        if requested is None or requested.segment_tokens or not isinstance(saved_rule, str):
            return
        rule = requested.of_state(saved_rule)
        if rule is None:
            return
        self._check_stages(source.name, rule)
        if rule == self._rules[number]:
            return
        self._rules[number] = rule
        self.streams[number] = self._stream(number)
        self.fim_by_source[number] = self.streams[number].planner.fim

    def _check_stages(self, name: str, rule: FimRule) -> None:
        """Raise DataError if rows cut the segments in a state's rule; only warn if an older release wrote the state."""
        length = rule.cut_by(self._row_lengths)
        if length is not None:
            raise DataError(
                f"{self._path}: the run splits documents in {name!r} into fill-in-the-middle segments of "
                f"{rule.segment_tokens} tokens. A stage with row_tokens={length} would cut them and separate middles "
                f"from their prefix or suffix.\nSet row_tokens in its stages to a multiple of {rule.segment_tokens}, "
                "or rename the source to start it from its first row."
            )
        shortest = min(self._row_lengths)
        # The release that began the run cut segments in this way, and the run must continue unchanged.
        if not rule.segment_tokens and shortest < self._seq_len:
            log.warning(
                "%s: source %r keeps the segment rule from the release that started the run: rows of %d tokens cut its "
                "segments of %d, which separates some middles from their prefix or suffix.",
                *(self._path, name, shortest, self._seq_len),
            )

    def _begin(self, number: int) -> RowStream:
        """Return a source's stream, with segments that fit all row lengths."""
        requested = self._rules[number]
        if requested is None:
            return self._stream(number)
        try:
            self._rules[number] = requested.for_rows(self._row_lengths)
            return self._stream(number)
        except ConfigError as error:
            # A new run may not start like this (``check_rows``); a run from an older release keeps its segments.
            self._rules[number] = requested
            stream = self._stream(number)
            self._too_short = error
            return stream

    def _stream(self, number: int) -> RowStream:
        """Build a source's stream under its current rule."""
        source, shards = self._mixture.sources[number], self._corpus.folders[number]
        own = source_seed(self._seed, source.name)
        fim = fim_of(self._rules[number], shards.tokenizer, seed=own, seq_len=self._seq_len)
        options = {"seed": own, "shuffle": self._shuffle, "packing": self._packing}
        return RowStream(BlockPlanner(shards, self._seq_len, upsample=source.upsample, fim=fim, **options))


def source_seed(seed: int, name: str) -> int:
    """Derive a source's seed from its name: other sources may come and go, and equal folders get different orders."""
    return key64(seed, xxhash.xxh3_64_intdigest(name.encode()))
