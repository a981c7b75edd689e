"""Data loaders over packed rows: ``build_loader`` for training, ``build_validation_loader`` for validation.

The global row order does not depend on the number of ranks, so a loader state resumes on any number.

Step s takes the global rows [s·R, (s+1)·R), R = ``rows_per_step``: the global batch, in rows. ``rows.micro_batches``
assigns them in order: with D data ranks and B rows in every micro-batch, micro-batch a on data rank d takes the B rows
from s·R + a·(D·B) + d·B on. With ``cost``, a step's rows are permuted first, to balance the ranks' work. An epoch is
planned in epoch blocks (``rows.epoch_blocks``), and only the current and the next one are in memory. Epoch e + 1
follows epoch e without a gap, also within a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.mixture.file import Mixture, is_mixture
from data_pipeline.mixture.mixed_order import MixedOrder, MixtureEstimate
from data_pipeline.rows.epoch_blocks import FirstRows, PackReport
from data_pipeline.rows.micro_batches import MicroBatches, balanced
from data_pipeline.rows.order import FolderOrder, RowOrder
from data_pipeline.rows.pack import BEST_FIT, Packing, Row
from data_pipeline.rows.packing_checks import check_mixture_options, check_mixture_sources
from data_pipeline.rows.row_batches import Place
from data_pipeline.rows.row_reader import RowReader, documents_in, masking_of, reader_options_for
from data_pipeline.rows.token_masking import Masking, MaskRule
from data_pipeline.shards.reader import Corpus, ShardSet
from data_pipeline.shards.shard_verification import open_validated
from data_pipeline.stores.urls import Location
from longctx.batch import Batch, PackedDocuments
from longctx.compact_batch import CompactBatch
from longctx.errors import ConfigError, DataError

Cost = Callable[..., int]
"""Returns a row's work, in any unit, from its documents' lengths and, for pairs, its sources' lengths."""

OpenFolder = Callable[[str | Location], ShardSet]
"""Function that opens a shard folder; raises ``DataError`` if the folder cannot be read."""

IndexedRows = FirstRows | list[Row]
"""Validation rows, by row number."""


def build_loader(
    data: str | Path | ShardSet,
    *,
    seq_len: int,
    rows_per_step: int,
    micro_batch_rows: int = 1,
    data_rank: int = 0,
    data_degree: int = 1,
    seed: int = 0,
    shuffle: bool = True,
    packing: Packing = BEST_FIT,
    cost: Cost | None = None,
    sync_per_micro_batch: bool = False,
    mask: MaskRule | None = None,
    source_seq_len: int = 0,
    verify: bool = True,
    open_folder: OpenFolder | None = None,
) -> Loader:
    """Build an endless iterator over this data rank's micro-batches from a shard folder or a mixture file.

    ``data_rank`` and ``data_degree`` are the data-parallel rank and size. ``rows_per_step`` is the global batch: rows
    over all data ranks and micro-batches. A micro-batch is [rows, seq_len] with at most ``micro_batch_rows`` rows; if
    that does not divide a rank's rows per step, some micro-batches have one row less.

    ``cost`` permutes rows within each step so that data ranks have nearly equal work. With ``sync_per_micro_batch``,
    for ranks that wait for one another in every micro-batch, work is balanced within each. ``mask`` selects tokens to
    hide and predict. ``source_seq_len`` bounds a row's source tokens; 0 without sources.

    ``verify`` checks data before it is read (``open_validated``); a folder that is already open stays as it is.
    ``open_folder`` replaces the function that opens folders, and ``verify`` then has no effect.

    Raises ``ConfigError`` if sizes do not fit and ``DataError`` if a folder cannot be read.
    """
    _check_sizes(seq_len=seq_len, micro_batch_rows=micro_batch_rows, data_rank=data_rank, data_degree=data_degree)
    _check_rows_per_step(rows_per_step, data_degree=data_degree)
    open_folder = open_folder or _opener(verify=verify)
    order_options = {"seed": seed, "shuffle": shuffle, "packing": packing, "source_seq_len": source_seq_len}
    folders, order = open_order(data, seq_len, open_folder=open_folder, **order_options)
    return Loader(
        folders,
        order,
        seq_len=seq_len,
        source_seq_len=source_seq_len,
        **reader_options_for(folders, packing, seq_len, source_seq_len, seed=seed),
        rows_per_step=rows_per_step,
        micro_batch_rows=micro_batch_rows,
        data_rank=data_rank,
        data_degree=data_degree,
        cost=cost,
        sync_per_micro_batch=sync_per_micro_batch,
        masking=masking_of(mask, folders, seed=seed),
    )


def build_validation_loader(
    data: str | Path | ShardSet,
    *,
    seq_len: int,
    max_rows: int | None = None,
    micro_batch_rows: int = 1,
    data_rank: int = 0,
    data_degree: int = 1,
    even: bool = False,
    verify: bool = True,
    open_folder: OpenFolder | None = None,
    held_out: bool = False,
    mask: MaskRule | None = None,
    source_seq_len: int = 0,
    packing: Packing = BEST_FIT,
) -> ValidationLoader:
    """Build a loader over the first ``max_rows`` rows (all if unset) in a shard folder or mixture, in a fixed order.

    Each iteration yields these rows once, the same ones for any seed. A mixture is read with its initial token shares;
    with ``held_out``, only the documents held out from its sources are read. ``held_out`` does not affect a shard
    folder.

    Every rank gets the same number of micro-batches, with ``micro_batch_rows`` rows each. Padding rows complete the
    last one: on some ranks it may contain only padding. With ``even``, micro-batches have at most ``micro_batch_rows``
    rows, as equal as possible, and fewer than ``data_degree`` padding rows are needed.

    Raises ConfigError if sizes do not fit and DataError if a folder is empty or cannot be read.
    """
    _check_sizes(seq_len=seq_len, micro_batch_rows=micro_batch_rows, data_rank=data_rank, data_degree=data_degree)
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"max_rows={max_rows} must be at least 1. Omit it to use all rows.")
    sizes = {"micro_batch_rows": micro_batch_rows, "data_rank": data_rank, "data_degree": data_degree, "even": even}
    open_folder = open_folder or _opener(verify=verify)
    names: tuple[str, ...] = ()
    if isinstance(data, ShardSet) or not is_mixture(data):
        folders = (_open_shards(data, open_folder),)
        rows: IndexedRows = FirstRows(
            folders[0], seq_len, max_rows=max_rows, source_seq_len=source_seq_len, packing=packing
        )
    else:
        check_mixture_options(data, packing.examples, source_seq_len)
        # Both mixtures lack stages and upsampling: validation losses must not depend on the training schedule.
        if held_out:
            mixture = held_out_mixture(data)
        else:
            mixture = Mixture.load(data).to_validate()
        folders, order = _open_mixture(mixture, Path(data), seq_len, open_folder, shuffle=False, packing=packing)
        rows = order.first_rows(max_rows)
        names = tuple(source.name for source in mixture.sources)
    # Mask the same tokens in every run, whatever its seed, so that losses are comparable between runs.
    masking = masking_of(mask, folders, seed=0)
    reader_options = {"masking": masking, "source_seq_len": source_seq_len}
    reader_options |= reader_options_for(folders, packing, seq_len, source_seq_len, seed=0, augments=False)
    return ValidationLoader(folders, rows, seq_len=seq_len, source_names=names, **reader_options, **sizes)


def open_order(
    data: str | Path | ShardSet,
    seq_len: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    packing: Packing = BEST_FIT,
    source_seq_len: int = 0,
    open_folder: OpenFolder = open_validated,
) -> tuple[tuple[ShardSet, ...], RowOrder]:
    """Open a training run's shard folders and return them with their row order (``rows.order``), for planning without a
    loader.

    ``data`` is one folder or a mixture file that lists several. Raises ConfigError for an invalid file, and DataError
    if a folder is empty or cannot be read.
    """
    order_options = {"seed": seed, "shuffle": shuffle, "packing": packing}
    if isinstance(data, ShardSet) or not is_mixture(data):
        shards = _open_shards(data, open_folder)
        return (shards,), FolderOrder(shards, seq_len, source_seq_len=source_seq_len, **order_options)
    check_mixture_options(data, packing.examples, source_seq_len)
    return _open_mixture(Mixture.load(data), Path(data), seq_len, open_folder, **order_options)


def held_out_mixture(path: str | Path) -> Mixture:
    """Return a mixture file's validation mixture, over the documents held out from its sources.

    Sources without held-out documents are left out, so the result may have no sources.
    """
    return Mixture.load(path).held_out(Path(path).parent)


def _open_mixture(
    mixture: Mixture, path: Path, seq_len: int, open_folder: OpenFolder, **options: Any
) -> tuple[tuple[ShardSet, ...], MixedOrder]:
    folders = tuple(_open_shards(folder, open_folder) for folder in mixture.folders(path.parent))
    names = (source.name for source in mixture.sources)
    check_mixture_sources(path, zip(names, (shards.manifest for shards in folders), strict=True))
    return folders, MixedOrder(mixture, Corpus(folders), seq_len, path=path, **options)


@dataclass(frozen=True)
class LocalMicroBatch:
    """One rank's portion of a micro-batch, and what the full micro-batch contains."""

    share: CompactBatch
    """This rank's tokens, [1, t]: the micro-batch's rows are concatenated before they are sharded."""
    documents: PackedDocuments
    """Documents in the full micro-batch, without padding after its rows."""
    row_numbers: tuple[int, ...]
    """Number of each of the micro-batch's rows within the step, from 0, before balancing permutes them."""
    source_lengths: tuple[int, ...] = ()
    """Source tokens per document, for pairs; covers the full micro-batch."""


class Loader:
    """Endless iterator over one data rank's micro-batches; see ``build_loader``.

    ``next`` reads complete micro-batches, ``take`` only this rank's portion (context parallelism). ``claim`` postpones
    that read, so that training can prefetch in threads (``StepPrefetcher``). All three advance the same position.
    """

    def __init__(
        self,
        folders: Sequence[ShardSet],
        order: RowOrder,
        *,
        seq_len: int,
        rows_per_step: int,
        micro_batch_rows: int,
        data_rank: int,
        data_degree: int,
        cost: Cost | None = None,
        sync_per_micro_batch: bool = False,
        masking: Masking | None = None,
        source_seq_len: int = 0,
        **reader_options: Any,
    ) -> None:
        """Initialize the loader; ``order`` numbers documents across ``folders`` as ``Corpus`` does."""
        self.folders = tuple(folders)
        """Folders to read, all built with the same tokenizer."""
        if masking is not None and any(order.fim_by_folder):
            raise ConfigError(
                "train.objective=masked cannot be combined with fill-in-the-middle, which a mixture source uses.\n"
                "Set fim_rate=0 for each source."
            )
        self._order = order
        self._reader = RowReader(
            documents_in(folders, order.fim_by_folder), seq_len, masking, source_seq_len, **reader_options
        )
        self.seq_len = seq_len
        self._cost, self._sync_per_micro_batch = cost, sync_per_micro_batch
        self.micro_batches = MicroBatches.assign(rows_per_step, most_rows=micro_batch_rows, data_degree=data_degree)
        """Assignment of a step's rows to micro-batches and ranks."""
        self._rows_per_step = rows_per_step
        self._data_rank = data_rank
        # End of the last completed step. Only this position is saved, so a checkpoint never points into a step.
        self._position = order.start()
        # Current step: numbered rows for all ranks, the position after them, and the next micro-batch's index.
        self._step_rows: list[tuple[int, Row]] = []
        self._step_end = self._position
        self._micro_batch = 0

    def __iter__(self) -> Iterator[Batch]:
        """Return the loader itself: iteration continues at the current position and never ends."""
        return self

    def __next__(self) -> Batch:
        """Return this data rank's next micro-batch, [rows, seq_len], with all its tokens and unpacked."""
        rows = [row for _, row in self._next_rows()]
        batch = self._reader.batch(rows)
        self._advance()
        return batch.unpack()

    def take(self, place: Place, place_source: Place | None = None) -> LocalMicroBatch:
        """Read this rank's portion of the next micro-batch: the tokens that ``place`` selects.

        ``place_source`` selects its source tokens; None means ``place``. Reads only that portion. The result is bitwise
        equal to sharding the micro-batch that ``next`` returns.
        """
        # Advance only after a successful read: a failed one leaves the position unchanged.
        taken = self._read(self._next_rows(), place, place_source)
        self._advance()
        return taken

    def claim(self) -> Callable[..., LocalMicroBatch]:
        """Advance past the next micro-batch and return a thread-safe function that reads it.

        The function takes ``take``'s arguments and returns its result.
        """
        # Choose the rows here, on the calling thread: the returned function does not use the loader's position, so
        # prefetch threads may call it late or in any order.
        rows = self._next_rows()
        self._advance()
        return partial(self._read, rows)

    def _read(
        self, rows: Sequence[tuple[int, Row]], place: Place, place_source: Place | None = None
    ) -> LocalMicroBatch:
        share, documents, source_lengths = self._reader.share([row for _, row in rows], place, place_source)
        return LocalMicroBatch(share, documents, tuple(number for number, _ in rows), source_lengths)

    @property
    def shards(self) -> ShardSet:
        """First folder, for values that all folders share: the tokenizer and the padding id."""
        return self.folders[0]

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches that this rank takes per step."""
        return len(self.micro_batches)

    @property
    def epoch(self) -> int:
        """Epoch, from 0, that contains the next step's first row."""
        return self._position.epoch

    @property
    def rows_consumed(self) -> int:
        """Rows in all completed steps, over all ranks."""
        return self._position.rows_consumed

    @property
    def tokens_consumed(self) -> int:
        """Tokens in all completed steps, over all ranks, without padding."""
        return self._position.tokens_consumed

    def next_documents(self) -> list[PackedDocuments]:
        """Return the documents in each of this data rank's micro-batches for the next step, without reading tokens."""
        assert self._micro_batch == 0, "next_documents was called within a step"
        ordered_rows = self._ordered_rows()
        own_rows = [self.micro_batches.rows(number, self._data_rank) for number in range(len(self.micro_batches))]
        return [self._reader.layout([row for _, row in ordered_rows[own.start : own.stop]]) for own in own_rows]

    def estimate_usage(self, steps: int) -> MixtureEstimate | None:
        """Estimate a mixture's source usage over the next steps; None for a single folder."""
        if isinstance(self._order, MixedOrder):
            return self._order.estimate_usage(self._position, steps * self._rows_per_step)
        return None

    def pack_report(self) -> PackReport:
        """Report rows, padding, cuts and truncation in the current epoch; estimated if it has several epoch blocks."""
        return self._order.report(self._position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last completed step as plain JSON, with the data and options it is valid for.

        It is equal on all ranks, and can be loaded on any number of ranks.
        """
        return self._order.state(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step that saved ``state``; raise ``DataError`` if its data or row order differs."""
        self._position = self._order.read(state)
        # The state may change the fill-in-the-middle segments, so rebuild the documents with them.
        self._reader = replace(self._reader, documents=documents_in(self.folders, self._order.fim_by_folder))
        # A partial step is read again from its first micro-batch.
        self._micro_batch = 0

    def _ordered_rows(self) -> list[tuple[int, Row]]:
        """Return the next step's rows with their numbers, in the order in which micro-batches take them.

        Stores the position after the step in ``_step_end``.
        """
        rows, self._step_end = self._order.rows(self._position, self._rows_per_step)
        if self._cost is None:
            return list(enumerate(rows))
        # Every rank computes costs for all ranks' rows and gets the same permutation, so balancing needs no
        # communication.
        costs = [self._cost(*lengths) for lengths in self._reader.lengths(rows)]
        row_numbers = balanced(costs, self.micro_batches, sync_per_micro_batch=self._sync_per_micro_batch)
        return [(number, rows[number]) for number in row_numbers]

    def _next_rows(self) -> list[tuple[int, Row]]:
        """Return the rows in this data rank's next micro-batch."""
        if self._micro_batch == 0:
            self._step_rows = self._ordered_rows()
        own = self.micro_batches.rows(self._micro_batch, self._data_rank)
        return self._step_rows[own.start : own.stop]

    def _advance(self) -> None:
        """Advance to the next micro-batch or, after the last one, to the next step."""
        self._micro_batch += 1
        if self._micro_batch == self.micro_batches_per_step:
            # The position moves only here, after the step's last micro-batch has claimed its rows.
            self._position = self._step_end
            self._micro_batch = 0


class ValidationLoader:
    """Fixed rows in a fixed order for one data rank; see ``build_validation_loader``."""

    def __init__(
        self,
        folders: Sequence[ShardSet],
        rows: IndexedRows,
        *,
        seq_len: int,
        micro_batch_rows: int,
        data_rank: int,
        data_degree: int,
        even: bool = False,
        source_names: tuple[str, ...] = (),
        masking: Masking | None = None,
        source_seq_len: int = 0,
        **reader_options: Any,
    ) -> None:
        """Initialize the loader; ``rows`` number documents across ``folders`` as ``Corpus`` does."""
        self.folders = tuple(folders)
        """Folders to read, all built with the same tokenizer."""
        self.source_names = source_names
        """The mixture's name for each folder; empty if a single folder is read."""
        self._rows = rows
        self._reader = RowReader(documents_in(folders), seq_len, masking, source_seq_len, **reader_options)
        self.seq_len = seq_len
        # Round up with padding rows, so that no row is dropped: to full micro-batches on all ranks or, if even, only to
        # equally many rows per rank.
        multiple = data_degree
        if not even:
            multiple *= micro_batch_rows
        padded_rows = -(-len(rows) // multiple) * multiple
        self._micro_batches = MicroBatches.assign(padded_rows, most_rows=micro_batch_rows, data_degree=data_degree)
        self._data_rank = data_rank

    @property
    def shards(self) -> ShardSet:
        """First folder, for values that all folders share: the tokenizer and the padding id."""
        return self.folders[0]

    @property
    def num_rows(self) -> int:
        """Rows over all ranks, without padding rows."""
        return len(self._rows)

    def segments(self, row: int) -> list[tuple[np.ndarray, int, int]]:
        """Return a row's two-segment examples: unmasked tokens, start token of the second segment, and order label."""
        return self._reader.segments(self._rows[row])

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Mean text bytes per token over these rows, derived from the folders' means; None if unknown.

        It is unknown for conversations (the mean covers all tokens, the loss only target tokens), for masked tokens
        (predicted from both sides), and for examples made from texts (half their targets are sentinels).
        """
        reader = self._reader
        is_unknown = reader.masking is not None or reader.recipe is not None or reader.replies is not None
        if is_unknown or any(shards.is_masked for shards in self.folders):
            return None
        means = [shards.manifest.bytes_per_token for shards in self.folders]
        if len(means) == 1:
            return means[0]
        # Weight each folder's mean by the tokens that these rows take from it.
        corpus, tokens = Corpus(self.folders), [0] * len(means)
        for number in range(len(self._rows)):
            for document, start, stop in self._rows[number]:
                tokens[corpus.folder_of(document)] += stop - start
        if None in means or not sum(tokens):
            return None
        return sum(mean * count for mean, count in zip(means, tokens, strict=True) if mean) / sum(tokens)

    def __len__(self) -> int:
        """Return the number of micro-batches, the same on every rank."""
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches, each time from the first row."""
        for number in range(len(self)):
            yield self._reader.batch(self._rows_of(number)).unpack()

    def shares(self, place: Place, place_source: Place | None = None) -> Iterator[CompactBatch]:
        """Yield this rank's portion of each micro-batch, [1, t]: the tokens that ``place`` selects.

        ``place_source`` selects source tokens; None means ``place``. Reads only these portions.
        """
        for number in range(len(self)):
            yield self._reader.share(self._rows_of(number), place, place_source)[0]

    def _rows_of(self, number: int) -> list[Row]:
        """Return the rows in this data rank's micro-batch ``number``."""
        own = self._micro_batches.rows(number, self._data_rank)
        rows = [self._rows[row] for row in own if row < len(self._rows)]
        # Every rank joins every collective, so a rank without rows gets padding rows.
        return rows + [Row() for _ in range(len(own) - len(rows))]


def _opener(*, verify: bool) -> OpenFolder:
    if verify:
        return open_validated
    return partial(ShardSet.open, verify=False)


def _open_shards(folder: str | Location | ShardSet, open_folder: OpenFolder) -> ShardSet:
    """Open a shard folder unless it is open already; raise ``DataError`` if it has no documents."""
    shards = folder if isinstance(folder, ShardSet) else open_folder(folder)
    if not shards.num_documents:
        raise DataError(f"{shards.folder} contains no documents. Build it again from a source with text.")
    return shards


def _check_sizes(*, seq_len: int, micro_batch_rows: int, data_rank: int, data_degree: int) -> None:
    for name, value in (("seq_len", seq_len), ("micro_batch_rows", micro_batch_rows), ("data_degree", data_degree)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1.")
    if not 0 <= data_rank < data_degree:
        raise ConfigError(f"data_rank={data_rank} must be at least 0 and below data_degree={data_degree}.")


def _check_rows_per_step(rows_per_step: int, *, data_degree: int) -> None:
    if rows_per_step < 1 or rows_per_step % data_degree:
        below = max(rows_per_step // data_degree, 0) * data_degree
        nearest = f"{below + data_degree}"
        if below:
            nearest = f"{below} or {below + data_degree}"
        raise ConfigError(
            f"rows_per_step={rows_per_step} must be a positive multiple of data_degree={data_degree}. "
            f"Try rows_per_step={nearest}."
        )
