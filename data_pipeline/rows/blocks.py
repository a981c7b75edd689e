"""Blocks of an epoch: about 65,000 documents are planned at a time, so startup costs the same for any corpus.

A permutation computed on the fly assigns the documents of an epoch to blocks, and each block is packed separately
(``plan_parts``). So block b of epoch e is a function of (manifest, seq_len, seed, e, b): it can be planned without the
previous blocks, on any rank. The number of rows of an epoch is known only after planning all its blocks; before that
there is an estimate.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np

from data_pipeline.rows.checks import check_sides, no_row
from data_pipeline.rows.examples import tokens_around
from data_pipeline.rows.fim import Fim
from data_pipeline.rows.pack import BEST_FIT, Packing, Parts, Row, RowPlan, Upsampling, copies_of, plan_parts
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import Permutation
from longctx.errors import ConfigError, DataError

PLAN_VERSION = 2
"""Changes with the order of rows: a loader state refers to rows of one version. A single block is as in version 1."""

MIN_DOCUMENTS = 1 << 16
"""Documents of a block, at least: enough to find one that fits, and a plan in less than 0.1 s."""
MIN_ROWS = 256
"""Rows of a block, at least: its last row is half empty on average, which is 0.2 % of so many."""
MAX_DOCUMENTS = MAX_ROWS = 1 << 20
"""What bounds the memory and the time of a plan where the two lower bounds would not: about 100 MB, and a second."""

MAX_FILES = 1024
"""Shards that a block reads lengths from: each costs a few disk reads. A corpus of more is dealt out in runs."""

_DEAL = 0
"""Salt of the permutation; ``rows.pack`` has the others."""


@dataclass(frozen=True)
class PackReport:
    """Cost of packing: of one epoch, or of its first blocks, scaled to the full epoch."""

    rows: int
    tokens: int
    padding_tokens: int
    padding_share: float
    """Padding tokens divided by all tokens of the rows."""
    documents_cut: int
    """Documents that do not stand in one row whole: by best fit exactly those longer than a row."""
    truncated_tokens: int
    """Tokens of documents that stand in no row: 0 unless rests are left out, and counted rather than assumed."""
    planned_documents: int
    """Documents that were planned to count this."""
    exact: bool
    """Whether these are all. Else the rest is taken to be like them, and rows, padding and cuts are estimates."""
    pairs_left_out: int | None = None
    """Pairs that no row can hold, as they are longer than a row on either side; None of other documents. They count
    among the documents that are cut."""

    @classmethod
    def of(cls, plans: Iterable[RowPlan], seq_len: int) -> PackReport:
        """Return the sums over these plans."""
        rows = packed = kept = tokens = cut = documents = 0
        pairs = None
        for plan in plans:
            rows += plan.num_rows
            packed += plan.taken
            kept += int(plan.pieces.lengths.sum())
            cut += plan.num_cut
            if plan.pieces.source_lengths is not None:
                pairs = cut
            tokens += plan.document_tokens
            documents += plan.num_documents
        padding = rows * seq_len - packed
        share = 0.0
        if rows:
            share = padding / (rows * seq_len)
        return cls(rows, packed, padding, share, cut, tokens - kept, documents, exact=True, pairs_left_out=pairs)

    @classmethod
    def together(cls, reports: Sequence[PackReport], seq_len: int) -> PackReport:
        """Return the combined report of several corpora, or of several blocks."""
        pairs = [report.pairs_left_out for report in reports if report.pairs_left_out is not None]
        rows = sum(report.rows for report in reports)
        padding = sum(report.padding_tokens for report in reports)
        return cls(
            rows=rows,
            tokens=sum(report.tokens for report in reports),
            padding_tokens=padding,
            padding_share=padding / max(rows * seq_len, 1),
            documents_cut=sum(report.documents_cut for report in reports),
            truncated_tokens=sum(report.truncated_tokens for report in reports),
            planned_documents=sum(report.planned_documents for report in reports),
            exact=all(report.exact for report in reports),
            pairs_left_out=sum(pairs) if pairs else None,
        )

    def scaled(self, documents: Fraction, tokens: Fraction, seq_len: int) -> PackReport:
        """Return an estimate for ``documents`` times the documents and ``tokens`` times the tokens of this sample.

        Rows grow in proportion to the tokens packed into them.
        """
        rows, packed = math.ceil(self.rows * tokens), round(self.tokens * tokens)
        pairs = self.pairs_left_out
        if pairs is not None:
            pairs = round(pairs * documents)
        return replace(
            self,
            rows=rows,
            tokens=packed,
            padding_tokens=rows * seq_len - packed,
            documents_cut=round(self.documents_cut * documents),
            truncated_tokens=round(self.truncated_tokens * documents),
            exact=False,
            pairs_left_out=pairs,
        )


@dataclass(frozen=True)
class Deal:
    """Assignment of an epoch's documents to blocks."""

    num_blocks: int
    run_documents: int = 1
    """Neighbours in the shards that come to one block together. Within it each has a place of its own."""

    @classmethod
    def of(cls, documents: int, tokens: int, shards: int, seq_len: int) -> Deal:
        """Return the assignment for a corpus: as many blocks as still have enough documents and rows, at least one."""
        # As many as leave each block enough documents, and enough tokens for its rows …
        most = min(documents // MIN_DOCUMENTS, tokens // (MIN_ROWS * seq_len))
        # … unless a block would be too large: short documents in very long rows, or very long ones in short rows.
        least = max(-(-documents // MAX_DOCUMENTS), -(-tokens // (MAX_ROWS * seq_len)))
        num_blocks = max(1, most, min(least, documents))
        if shards <= MAX_FILES:
            return cls(num_blocks)
        # One shard per run, or two if it crosses from one to the next.
        return cls(num_blocks, max(1, documents // num_blocks // MAX_FILES))


@dataclass(frozen=True)
class Stretch:
    """The first rows of a block, or of its remaining part, that were taken at one row length."""

    row_tokens: int
    rows: int


_Key = tuple[int, int, int, tuple[Stretch, ...]]
"""Epoch, block, tokens of a row, and the rows that were taken before: a plan is a function of these."""


class BlockPlanner:
    """Planner of a shard folder's rows, block by block. It holds two blocks at a time and is thread-safe."""

    _HELD = 2
    """Blocks in memory: the one that is read, and the next."""

    def __init__(
        self,
        shards: ShardSet,
        seq_len: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        deal: Deal | None = None,
        upsample: tuple[Upsampling, ...] = (),
        packing: Packing = BEST_FIT,
        fim: Fim | None = None,
        source_seq_len: int = 0,
    ) -> None:
        """Initialize; ``deal`` defaults to that of the corpus, and ``fim`` is ``packing.fim`` resolved for this folder.

        ``source_seq_len`` bounds the sources of a row of pairs. Raises ConfigError for pairs without it, and if it is
        set without pairs.
        """
        self._tokens_around = 0
        if packing.examples is None:
            check_sides(shards, source_seq_len)
        else:
            self._tokens_around = sum(tokens_around(shards))
        entries = shards.manifest.shards
        if deal is None:
            deal = Deal.of(shards.num_documents, sum(entry.tokens for entry in entries), len(entries), seq_len)
        self._shards = shards
        self.folder = shards.folder
        self._seq_len = seq_len
        self._seed = seed
        self._shuffle = shuffle
        self._run = deal.run_documents
        self._upsample, self._packing, self.fim, self._source_seq_len = upsample, packing, fim, source_seq_len
        self.num_blocks = deal.num_blocks
        self._plans: OrderedDict[_Key, Future[RowPlan]] = OrderedDict()
        self._lock = threading.Lock()

    def plan(
        self, epoch: int, block: int, *, row_tokens: int | None = None, before: tuple[Stretch, ...] = ()
    ) -> RowPlan:
        """Return the rows of a block; wait if a thread is planning it. Raise DataError if shards cannot be read.

        Rows have ``row_tokens`` tokens, by default ``seq_len``, and are made of the part of the block that remains
        after the stretches ``before``.
        """
        key = (epoch, block, row_tokens or self._seq_len, before)
        future, is_new = self._claim(key)
        if is_new:
            self._fulfil(future, key)
        return future.result()

    def prepare(self, epoch: int, block: int, *, row_tokens: int | None = None) -> None:
        """Plan a block in a background thread, unless it is already planned or being planned."""
        key = (epoch, block, row_tokens or self._seq_len, ())
        future, is_new = self._claim(key)
        if is_new:
            # A daemon: a rank that fails does not wait for the disk.
            thread = threading.Thread(target=self._fulfil, args=(future, key), name="longctx-plan", daemon=True)
            thread.start()

    def next_block(self, epoch: int, block: int) -> tuple[int, int]:
        """Return epoch and number of the block after this one."""
        if block + 1 < self.num_blocks:
            return epoch, block + 1
        return epoch + 1, 0

    def documents(self, epoch: int, block: int) -> np.ndarray:
        """Return the numbers of a block's documents, int64 [n], ascending, so that shards are read front to back."""
        count = self._shards.num_documents
        runs = -(-count // self._run)
        # As equal as possible: a last block of a few documents would be mostly padding.
        numbers = np.arange(block * runs // self.num_blocks, (block + 1) * runs // self.num_blocks)
        if self._shuffle:
            # Their order within the block is set by ``plan_parts``.
            numbers = np.sort(Permutation(runs, self._seed, epoch, _DEAL).at(numbers))
        documents = (numbers[:, None] * self._run + np.arange(self._run)).ravel()
        # The last run may be shorter.
        return documents[documents < count]

    def report(self, epoch: int = 0, *, documents: int = 1) -> PackReport:
        """Return the cost of packing an epoch, estimated from the first blocks with at least ``documents`` documents.

        Counts are scaled to the epoch. Blocks are counted until there is a row, if necessary to the epoch's end.
        """
        least = -(-documents * self.num_blocks // max(self._shards.num_documents, 1))
        report, blocks, planned = PackReport.of([], self._seq_len), 0, 0
        while blocks < self.num_blocks and (blocks < least or not report.rows):
            plan = self.plan(epoch, blocks)
            report = PackReport.together([report, PackReport.of([plan], self._seq_len)], self._seq_len)
            blocks, planned = blocks + 1, planned + plan.document_tokens
        if blocks == self.num_blocks:
            return report
        tokens = self._shards.num_tokens - self._tokens_around * self._shards.num_documents
        if self._upsample or report.pairs_left_out is not None:
            # Copies by upsampling are unknown until they are drawn; for pairs their number is a better measure than
            # their tokens, since the longest pairs are in no row. Blocks have equal numbers of documents.
            tokens, planned = self.num_blocks, blocks
        return report.scaled(Fraction(self.num_blocks, blocks), Fraction(tokens, planned), self._seq_len)

    def no_row(self, instead: str = "") -> ConfigError | DataError:
        """Return the error for epochs without a row; ``instead`` adds another remedy to its message."""
        blocks = (self.documents(0, block) for block in range(self.num_blocks))
        return no_row(self._shards, self._packing.examples, (self._seq_len, self._source_seq_len), blocks, instead)

    def _claim(self, key: _Key) -> tuple[Future[RowPlan], bool]:
        """Return the block's future, and whether the caller has to plan it."""
        with self._lock:
            future = self._plans.get(key)
            is_new = future is None
            if future is None:
                future = self._plans[key] = Future()
            self._plans.move_to_end(key)
            if len(self._plans) > self._HELD:
                self._plans.popitem(last=False)
        return future, is_new

    def _fulfil(self, future: Future[RowPlan], key: _Key) -> None:
        """Plan a block and set the result or exception of its future."""
        try:
            plan = self._planned(key)
        except BaseException as error:
            # Not kept: the next request tries again.
            with self._lock:
                self._plans.pop(key, None)
            future.set_exception(error)
        else:
            future.set_result(plan)

    def _planned(self, key: _Key) -> RowPlan:
        """Plan the block: its documents, or the remaining ones if another row length began within it.

        No token that was already taken is planned again.
        """
        epoch, block, row_tokens, before = key
        order: dict[str, Any] = {"seed": self._seed, "epoch": epoch, "block": block, "shuffle": self._shuffle}
        order |= {"packing": self._packing, "source_seq_len": self._source_seq_len}
        left = _parts_of(self._shards, self.documents(epoch, block), self._tokens_around)
        if self._upsample:
            left = copies_of(left, self._upsample, seed=self._seed, epoch=epoch)
        if self.fim is not None:
            left = replace(left, stops=self.fim.lengths(left.documents, left.stops))
        for stretch in before:
            left = plan_parts(left, stretch.row_tokens, **order).parts_from(stretch.rows)
        return plan_parts(left, row_tokens, **order)


def _parts_of(shards: ShardSet, documents: np.ndarray, tokens_around: int) -> Parts:
    """Return the parts of these documents to plan, without ``tokens_around``; drop documents without text."""
    lengths = shards.lengths_of(documents)
    if shards.manifest.has_sources:
        return Parts.whole(documents, lengths, shards.lengths_of(documents, "source"))
    if tokens_around:
        # A document without text makes no example.
        documents, lengths = documents[lengths > tokens_around], lengths[lengths > tokens_around] - tokens_around
    return Parts.whole(documents, lengths)


class FirstRows:
    """At most ``max_rows`` rows of epoch 0; all, if None. Two blocks of them are in memory at a time."""

    def __init__(
        self,
        shards: ShardSet,
        seq_len: int,
        *,
        max_rows: int | None = None,
        deal: Deal | None = None,
        source_seq_len: int = 0,
        packing: Packing = BEST_FIT,
    ) -> None:
        """Plan enough blocks for ``max_rows``; ``deal`` defaults to that of the folder."""
        # No shuffle and no seed: losses of different runs are over the same rows.
        self._planner = BlockPlanner(
            shards, seq_len, shuffle=False, deal=deal, source_seq_len=source_seq_len, packing=packing
        )
        # Plan blocks until there are enough rows: for a large folder only the first, or the first few.
        counts: list[int] = []
        while len(counts) < self._planner.num_blocks and (max_rows is None or sum(counts) < max_rows):
            counts.append(self._planner.plan(0, len(counts)).num_rows)
        self._first_rows = list(accumulate(counts, initial=0))
        self._num_rows = self._first_rows[-1]
        if max_rows is not None:
            self._num_rows = min(max_rows, self._num_rows)
        if not self._num_rows:
            raise self._planner.no_row(", or validation.rows=0 for a run without validation")

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._num_rows

    def __getitem__(self, row: int) -> Row:
        """Return a row by its number."""
        block = bisect.bisect_right(self._first_rows, row) - 1
        return self._planner.plan(0, block).row(row - self._first_rows[block])
