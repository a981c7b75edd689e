"""Epoch blocks: about 65,000 documents are planned at a time, so startup costs the same for any corpus.

A permutation computed on demand assigns an epoch's documents to blocks, and each block is packed separately
(``plan_parts``). So block b in epoch e is a function of (manifest, seq_len, seed, e, b): any rank can plan it without
the previous blocks. An epoch's row count is known only once all its blocks are planned; until then it is an estimate.
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

from data_pipeline.rows.examples import num_special_tokens
from data_pipeline.rows.fim import Fim
from data_pipeline.rows.pack import BEST_FIT, Packing, Parts, Row, RowPlan, Upsampling, copies_of, plan_parts
from data_pipeline.rows.packing_checks import check_source_seq_len, no_rows_error
from data_pipeline.rows.preferences import PreferenceRule, check_preferences
from data_pipeline.shards.reader import ShardSet
from data_pipeline.shuffle import Permutation
from longctx.errors import ConfigError, DataError

PLAN_VERSION = 2
"""Changes with the row order: loader states refer to rows in one version. A single block equals version 1."""

MIN_DOCUMENTS = 1 << 16
"""Minimum documents per block: enough for a good fit, planned in less than 0.1 s."""
MIN_ROWS = 256
"""Minimum rows per block: a block's last row is half empty on average, 0.2 % of this many."""
MAX_DOCUMENTS = MAX_ROWS = 1 << 20
"""Upper bounds that override the minimums to limit a plan's memory and time to about 100 MB and one second."""

MAX_FILES = 1024
"""Shards from which an epoch block reads lengths: each costs a few disk reads. With more shards, documents are assigned
in spans.
"""

_BLOCKS_SEED_TAG = 0
"""Salt for the permutation; ``rows.pack`` has the other salts."""


@dataclass(frozen=True)
class PackReport:
    """Packing cost for one epoch, counted exactly or extrapolated from its first blocks."""

    rows: int
    tokens: int
    padding_tokens: int
    padding_share: float
    """Padding tokens divided by all row tokens."""
    documents_cut: int
    """Documents not contained completely in a single row: with best fit exactly those longer than a row."""
    truncated_tokens: int
    """Document tokens in no row, counted and not assumed; 0 unless a rule drops pieces."""
    planned_documents: int
    """Documents planned for these counts."""
    exact: bool
    """True if all documents were planned. Otherwise rows, padding and cuts are extrapolated from the planned ones."""
    pairs_left_out: int | None = None
    """Pairs in no row because they exceed a row on either side; included in ``documents_cut``. None without pairs."""

    @classmethod
    def of(cls, plans: Iterable[RowPlan], seq_len: int) -> PackReport:
        """Add up the counts over these plans."""
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
        """Combine reports from several corpora or several blocks."""
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
        """Extrapolate from this sample to ``documents`` times its documents and ``tokens`` times its tokens.

        Rows grow in proportion to the packed tokens.
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


# Block shuffle. Permuting spans of adjacent documents and giving epoch block b the b-th interval in the permutation
# yields three properties:
#
#   * Every document is in exactly one block per epoch: the intervals partition the permutation's domain.
#   * Block b costs O(block size): ``Permutation`` maps an index to a span without a stored order.
#   * A block's documents are scattered over the corpus, down to single documents with up to ``MAX_FILES`` shards. With
#     more shards, spans bound the files that a block touches. Within a block every document is shuffled on its own
#     (``plan_parts``).
@dataclass(frozen=True)
class BlockAssignment:
    """Assignment of an epoch's documents to epoch blocks."""

    num_blocks: int
    run_documents: int = 1
    """Adjacent documents assigned to the same block; their order within the block is shuffled individually."""

    @classmethod
    def of(cls, documents: int, tokens: int, shards: int, seq_len: int) -> BlockAssignment:
        """Choose as many blocks as still have enough documents and rows each, and at least one."""
        # At most as many blocks as leave each enough documents, and enough tokens for its rows …
        most = min(documents // MIN_DOCUMENTS, tokens // (MIN_ROWS * seq_len))
        # … unless a block would get too large: short documents in very long rows, or very long ones in short rows.
        least = max(-(-documents // MAX_DOCUMENTS), -(-tokens // (MAX_ROWS * seq_len)))
        num_blocks = max(1, most, min(least, documents))
        if shards <= MAX_FILES:
            return cls(num_blocks)
        # Each span of documents touches one shard, or two if it crosses a boundary.
        return cls(num_blocks, max(1, documents // num_blocks // MAX_FILES))


@dataclass(frozen=True)
class TakenRows:
    """Rows taken at one length from the start of an epoch block, or from its remaining documents."""

    row_tokens: int
    rows: int


_Key = tuple[int, int, int, tuple[TakenRows, ...]]
"""Epoch, block, row length, and the rows already taken at other lengths: a plan is a function of these."""


class BlockPlanner:
    """Plans a shard folder's rows block by block; thread-safe, with two blocks in memory."""

    _HELD = 2
    """Blocks in memory: the current and the next one."""

    def __init__(
        self,
        shards: ShardSet,
        seq_len: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        assignment: BlockAssignment | None = None,
        upsample: tuple[Upsampling, ...] = (),
        packing: Packing = BEST_FIT,
        fim: Fim | None = None,
        source_seq_len: int = 0,
    ) -> None:
        """Initialize; ``assignment`` defaults to the corpus's assignment, and ``fim`` is ``packing.fim`` resolved for
        this folder.

        ``source_seq_len`` bounds the source tokens in a row. Raises ConfigError if pairs come without it, or it comes
        without pairs.
        """
        self._special_tokens = 0
        if packing.examples is None:
            check_source_seq_len(shards, source_seq_len)
        elif isinstance(packing.examples, PreferenceRule):
            check_preferences(shards)
        else:
            self._special_tokens = sum(num_special_tokens(shards))
        entries = shards.manifest.shards
        if assignment is None:
            assignment = BlockAssignment.of(
                shards.num_documents, sum(entry.tokens for entry in entries), len(entries), seq_len
            )
        self._shards = shards
        self.folder = shards.folder
        self._seq_len = seq_len
        self._seed = seed
        self._shuffle = shuffle
        self._run = assignment.run_documents
        self._upsample, self._packing, self.fim, self._source_seq_len = upsample, packing, fim, source_seq_len
        self.num_blocks = assignment.num_blocks
        self._plans: OrderedDict[_Key, Future[RowPlan]] = OrderedDict()
        self._lock = threading.Lock()

    def plan(
        self, epoch: int, block: int, *, row_tokens: int | None = None, before: tuple[TakenRows, ...] = ()
    ) -> RowPlan:
        """Return a block's rows, waiting if another thread is planning it; raise DataError if shards cannot be read.

        Rows have ``row_tokens`` tokens (default ``seq_len``) and contain the block's documents that remain after
        ``before``.
        """
        key = (epoch, block, row_tokens or self._seq_len, before)
        future, is_new = self._claim(key)
        if is_new:
            self._fulfil(future, key)
        return future.result()

    def prepare(self, epoch: int, block: int, *, row_tokens: int | None = None) -> None:
        """Plan a block on a background thread unless it is planned or being planned."""
        key = (epoch, block, row_tokens or self._seq_len, ())
        future, is_new = self._claim(key)
        if is_new:
            # A daemon thread, so that a failing rank exits without waiting for the disk.
            thread = threading.Thread(target=self._fulfil, args=(future, key), name="longctx-plan", daemon=True)
            thread.start()

    def next_block(self, epoch: int, block: int) -> tuple[int, int]:
        """Return the epoch and index of the next block."""
        if block + 1 < self.num_blocks:
            return epoch, block + 1
        return epoch + 1, 0

    def documents(self, epoch: int, block: int) -> np.ndarray:
        """Return a block's documents, int64 [n], ascending, so that shards are read front to back."""
        count = self._shards.num_documents
        runs = -(-count // self._run)
        # Divide evenly: a last block with a few documents would be mostly padding.
        numbers = np.arange(block * runs // self.num_blocks, (block + 1) * runs // self.num_blocks)
        if self._shuffle:
            # Sorted here; ``plan_parts`` shuffles within the block.
            numbers = np.sort(Permutation(runs, self._seed, epoch, _BLOCKS_SEED_TAG).at(numbers))
        documents = (numbers[:, None] * self._run + np.arange(self._run)).ravel()
        # The last span may be shorter.
        return documents[documents < count]

    def report(self, epoch: int = 0, *, documents: int = 1) -> PackReport:
        """Report an epoch's packing cost, extrapolated from the first blocks with at least ``documents`` documents.

        Plans further blocks until there is a row, if necessary to the end of the epoch.
        """
        least = -(-documents * self.num_blocks // max(self._shards.num_documents, 1))
        report, blocks, planned = PackReport.of([], self._seq_len), 0, 0
        while blocks < self.num_blocks and (blocks < least or not report.rows):
            plan = self.plan(epoch, blocks)
            report = PackReport.together([report, PackReport.of([plan], self._seq_len)], self._seq_len)
            blocks, planned = blocks + 1, planned + plan.document_tokens
        if blocks == self.num_blocks:
            return report
        tokens = self._shards.num_tokens - self._special_tokens * self._shards.num_documents
        if self._upsample or report.pairs_left_out is not None:
            # Upsampling's copies are unknown until drawn, and for pairs the document count is a better measure than
            # tokens, since the longest pairs are in no row. Blocks have equal document counts, so scale by blocks.
            tokens, planned = self.num_blocks, blocks
        return report.scaled(Fraction(self.num_blocks, blocks), Fraction(tokens, planned), self._seq_len)

    def no_rows_error(self, alternative: str = "") -> ConfigError | DataError:
        """Build the error for epochs without a row; ``alternative`` adds another remedy to its message."""
        blocks = (self.documents(0, block) for block in range(self.num_blocks))
        return no_rows_error(
            self._shards,
            self._packing.examples,
            blocks,
            seq_len=self._seq_len,
            source_seq_len=self._source_seq_len,
            alternative=alternative,
        )

    def _claim(self, key: _Key) -> tuple[Future[RowPlan], bool]:
        """Return the block's future, and whether the caller has to plan it."""
        # Concurrent callers share one future: the first plans, the others wait for its result. A future evicted while
        # in use stays valid for its holders.
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
        """Plan a block and set its future's result or exception."""
        try:
            plan = self._planned(key)
        except BaseException as error:
            # Do not cache failures: the next request tries again.
            with self._lock:
                self._plans.pop(key, None)
            future.set_exception(error)
        else:
            future.set_result(plan)

    def _planned(self, key: _Key) -> RowPlan:
        """Plan a block's documents, or the remaining ones if another row length took effect within the block.

        Tokens that were already taken are never planned again.
        """
        epoch, block, row_tokens, before = key
        order: dict[str, Any] = {"seed": self._seed, "epoch": epoch, "block": block, "shuffle": self._shuffle}
        order |= {"packing": self._packing, "source_seq_len": self._source_seq_len}
        documents = self.documents(epoch, block)
        if isinstance(self._packing.examples, PreferenceRule):
            left = _records_of(self._shards, documents, self._packing.examples)
        else:
            left = _parts_of(self._shards, documents, self._special_tokens)
        if self._upsample:
            left = copies_of(left, self._upsample, seed=self._seed, epoch=epoch)
        if self.fim is not None:
            left = replace(left, ends=self.fim.lengths(left.documents, left.ends))
        # Replay each earlier row length: plan it, skip the rows taken at that length, and rejoin the pieces that it
        # cut.
        for taken_rows in before:
            left = plan_parts(left, taken_rows.row_tokens, **order).parts_from(taken_rows.rows)
        return plan_parts(left, row_tokens, **order)


def _parts_of(shards: ShardSet, documents: np.ndarray, special_tokens: int) -> Parts:
    """Return these documents as document parts to plan, without ``num_special_tokens``; drop documents without text."""
    lengths = shards.lengths_of(documents)
    if shards.manifest.has_sources:
        return Parts.whole(documents, lengths, shards.lengths_of(documents, "source"))
    if special_tokens:
        # A document without text makes no example.
        documents, lengths = documents[lengths > special_tokens], lengths[lengths > special_tokens] - special_tokens
    return Parts.whole(documents, lengths)


def _records_of(shards: ShardSet, records: np.ndarray, rule: PreferenceRule) -> Parts:
    """Return these records as document parts to plan, each as long as the row tokens that it takes."""
    prompt_lengths = shards.lengths_of(records, "source")
    return Parts.whole(records, rule.tokens_in_rows(prompt_lengths, shards.lengths_of(records)), prompt_lengths)


class FirstRows:
    """At most ``max_rows`` rows from epoch 0 (all if None), with two blocks in memory at a time."""

    def __init__(
        self,
        shards: ShardSet,
        seq_len: int,
        *,
        max_rows: int | None = None,
        assignment: BlockAssignment | None = None,
        source_seq_len: int = 0,
        packing: Packing = BEST_FIT,
    ) -> None:
        """Plan enough blocks for ``max_rows``; ``assignment`` defaults to the folder's."""
        # Neither shuffled nor seeded: losses from different runs are over the same rows.
        self._planner = BlockPlanner(
            shards, seq_len, shuffle=False, assignment=assignment, source_seq_len=source_seq_len, packing=packing
        )
        # Plan only as many blocks as needed: for a large folder the first, or the first few.
        counts: list[int] = []
        while len(counts) < self._planner.num_blocks and (max_rows is None or sum(counts) < max_rows):
            counts.append(self._planner.plan(0, len(counts)).num_rows)
        self._first_rows = list(accumulate(counts, initial=0))
        self._num_rows = self._first_rows[-1]
        if max_rows is not None:
            self._num_rows = min(max_rows, self._num_rows)
        if not self._num_rows:
            raise self._planner.no_rows_error(", or validation.rows=0 for a run without validation")

    def __len__(self) -> int:
        """Return the number of rows."""
        return self._num_rows

    def __getitem__(self, row: int) -> Row:
        """Return a row by its index."""
        block = bisect.bisect_right(self._first_rows, row) - 1
        return self._planner.plan(0, block).row(row - self._first_rows[block])
