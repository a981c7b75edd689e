"""Packed rows as batches: the same global rows for every number of ranks, and a state that resumes on any number.

Step s takes the global rows [s·R, (s+1)·R), R = ``rows_per_step``. ``rows.micro_batches`` assigns them in order: with B
rows in each, micro-batch a of data rank d takes those from s·R + a·(D·B) + d·B. With ``cost`` they are first reordered
to balance the work of the ranks. Rows of an epoch are planned block by block (``rows.blocks``), and only the current
block and the next one are in memory. Rows of epoch e + 1 follow those of epoch e directly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.mixture.file import Mixture, is_mixture
from data_pipeline.mixture.order import Forecast, MixedOrder
from data_pipeline.rows.batches import Place
from data_pipeline.rows.blocks import FirstRows, PackReport
from data_pipeline.rows.checks import check_no_pairs, check_one_folder
from data_pipeline.rows.mask import Masking, MaskRule
from data_pipeline.rows.micro_batches import MicroBatches, balanced
from data_pipeline.rows.order import FolderOrder, Order
from data_pipeline.rows.pack import BEST_FIT, Packing, Row
from data_pipeline.rows.sides import Sides, documents_in, masking_of, sides_of
from data_pipeline.shards.reader import Corpus, ShardSet
from data_pipeline.shards.verify import open_verified
from data_pipeline.stores.urls import Location
from longctx.batch import Batch, PackedDocuments
from longctx.compact_batch import CompactBatch
from longctx.errors import ConfigError, DataError

Cost = Callable[..., int]
"""The work that a row of documents of these lengths is, in any unit; of pairs of these lengths and those of sources."""

Open = Callable[[str | Location], ShardSet]
"""Opens a shard folder; ``DataError`` where it cannot be read."""


def build_loader(
    folder: str | Path | ShardSet,
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
    lockstep: bool = False,
    mask: MaskRule | None = None,
    source_seq_len: int = 0,
    verify: bool = True,
    open_folder: Open | None = None,
) -> Loader:
    """Build an endless iterator of this data rank's micro-batches from a shard folder or a mixture's file.

    ``rows_per_step`` counts the rows of all ranks and micro-batches together. A micro-batch is [rows, seq_len], with at
    most ``micro_batch_rows`` rows: if a rank's rows of a step are not a multiple of it, some micro-batches have one row
    less than others.
    With ``cost``, the work of a row, the rows of a step are assigned so that ranks have equal work; with ``lockstep``
    also in each micro-batch. With a ``mask`` some tokens are masked. Rows of pairs additionally have at most
    ``source_seq_len`` tokens of sources.
    With ``verify`` no damaged data is ever read (``open_verified``); a folder that is already open is used as it is.
    ``open_folder`` overrides the function that opens folders.
    Raises ``ConfigError`` for sizes that do not fit, ``DataError`` for a folder that cannot be read.
    """
    _check_sizes(seq_len=seq_len, micro_batch_rows=micro_batch_rows, data_rank=data_rank, data_degree=data_degree)
    _check_rows_per_step(rows_per_step, data_degree=data_degree)
    open_folder = open_folder or _opener(verify=verify)
    order_of = {"seed": seed, "shuffle": shuffle, "packing": packing, "source_seq_len": source_seq_len}
    folders, order = open_order(folder, seq_len, open_folder=open_folder, **order_of)
    return Loader(
        folders,
        order,
        seq_len=seq_len,
        source_seq_len=source_seq_len,
        **sides_of(folders, packing, seq_len, source_seq_len, seed=seed),
        rows_per_step=rows_per_step,
        micro_batch_rows=micro_batch_rows,
        data_rank=data_rank,
        data_degree=data_degree,
        cost=cost,
        lockstep=lockstep,
        masking=masking_of(mask, folders, seed=seed),
    )


def open_order(
    data: str | Path | ShardSet,
    seq_len: int,
    *,
    seed: int = 0,
    shuffle: bool = True,
    packing: Packing = BEST_FIT,
    source_seq_len: int = 0,
    open_folder: Open = open_verified,
) -> tuple[tuple[ShardSet, ...], Order]:
    """Open the shard folders of a run and return them with the order of their rows.

    ``data`` is one folder, or a mixture's file that names several. Raises ConfigError for an invalid file, DataError
    for a folder that cannot be read or is empty.
    """
    order = {"seed": seed, "shuffle": shuffle, "packing": packing}
    if isinstance(data, ShardSet) or not is_mixture(data):
        shards = _opened(data, open_folder)
        return (shards,), FolderOrder(shards, seq_len, source_seq_len=source_seq_len, **order)
    check_one_folder(data, packing.examples, source_seq_len)
    return _open_mixture(Mixture.load(data), Path(data), seq_len, open_folder, **order)


def held_out_of(path: str | Path) -> Mixture:
    """Return the mixture of the held-out documents of a mixture's sources; it has no sources if none holds any out."""
    return Mixture.load(path).held_out(Path(path).parent)


def _open_mixture(
    mixture: Mixture, path: Path, seq_len: int, open_folder: Open, **options: Any
) -> tuple[tuple[ShardSet, ...], MixedOrder]:
    folders = tuple(_opened(folder, open_folder) for folder in mixture.folders(path.parent))
    names = (source.name for source in mixture.sources)
    check_no_pairs(path, zip(names, (shards.manifest for shards in folders), strict=True))
    return folders, MixedOrder(mixture, Corpus(folders), seq_len, path=path, **options)


def build_validation_loader(
    folder: str | Path | ShardSet,
    *,
    seq_len: int,
    max_rows: int | None = None,
    micro_batch_rows: int = 1,
    data_rank: int = 0,
    data_degree: int = 1,
    even: bool = False,
    verify: bool = True,
    open_folder: Open | None = None,
    held_out: bool = False,
    mask: MaskRule | None = None,
    source_seq_len: int = 0,
    packing: Packing = BEST_FIT,
) -> ValidationLoader:
    """Build a loader of the first ``max_rows`` rows (all, if None) of a shard folder, in a fixed order.

    Each iteration yields these rows once. For a mixture's file, sources have their initial shares; ``held_out`` reads
    the held-out documents of its sources instead.

    Every rank gets the same number of micro-batches: of ``micro_batch_rows`` rows, or, if ``even``, of at most that
    many and as equal in size as possible. If rows do not divide evenly, the last ones contain only padding.
    """
    _check_sizes(seq_len=seq_len, micro_batch_rows=micro_batch_rows, data_rank=data_rank, data_degree=data_degree)
    if max_rows is not None and max_rows < 1:
        raise ConfigError(f"max_rows={max_rows} must be at least 1. Leave it out to use every row.")
    sizes = {"micro_batch_rows": micro_batch_rows, "data_rank": data_rank, "data_degree": data_degree, "even": even}
    open_folder = open_folder or _opener(verify=verify)
    names: tuple[str, ...] = ()
    if isinstance(folder, ShardSet) or not is_mixture(folder):
        folders = (_opened(folder, open_folder),)
        rows: Rows = FirstRows(folders[0], seq_len, max_rows=max_rows, source_seq_len=source_seq_len, packing=packing)
    else:
        check_one_folder(folder, packing.examples, source_seq_len)
        mixture = Mixture.load(folder).to_validate()
        if held_out:
            mixture = held_out_of(folder)
        folders, order = _open_mixture(mixture, Path(folder), seq_len, open_folder, shuffle=False)
        rows = order.first_rows(max_rows)
        names = tuple(source.name for source in mixture.sources)
    # The same tokens each time, independent of the run's seed, so that losses of different runs are comparable.
    masking = masking_of(mask, folders, seed=0)
    options = {"source_names": names, "masking": masking, "source_seq_len": source_seq_len}
    options |= sides_of(folders, packing, seq_len, source_seq_len, seed=0)
    return ValidationLoader(folders, rows, seq_len=seq_len, **options, **sizes)


@dataclass(frozen=True)
class Taken:
    """One rank's share of a micro-batch."""

    share: CompactBatch
    documents: PackedDocuments
    """Those of the whole micro-batch, without padding behind its rows."""
    rows: tuple[int, ...]
    """Its rows' numbers in the step."""
    source_lengths: tuple[int, ...] = ()
    """Tokens of the source of each document, of the whole micro-batch of pairs."""


class Loader:
    """Endless iterator over the micro-batches of one data rank, built by ``build_loader``."""

    def __init__(
        self,
        folders: Sequence[ShardSet],
        order: Order,
        *,
        seq_len: int,
        rows_per_step: int,
        micro_batch_rows: int,
        data_rank: int,
        data_degree: int,
        cost: Cost | None = None,
        lockstep: bool = False,
        masking: Masking | None = None,
        source_seq_len: int = 0,
        **of_sides: Any,
    ) -> None:
        """Initialize the loader; ``order`` numbers the documents of all ``folders`` as ``Corpus`` does."""
        self.folders = tuple(folders)
        """What is read. One tokenizer made them all."""
        if masking is not None and any(order.fims):
            raise ConfigError(
                "train.objective=masked hides tokens in their text, and a source of the mixture fills in its middle.\n"
                "Set fim_rate=0 of each source."
            )
        self._order = order
        self._sides = Sides(documents_in(folders, order.fims), seq_len, masking, source_seq_len, **of_sides)
        self.seq_len = seq_len
        self._cost, self._lockstep = cost, lockstep
        self.micro_batches = MicroBatches.deal(rows_per_step, most_rows=micro_batch_rows, data_degree=data_degree)
        """How the rows of a step are dealt out."""
        self._rows_per_step = rows_per_step
        self._data_rank = data_rank
        # The end of the last completed step; the state consists of these numbers, so it never points into a step.
        self._position = order.start()
        # The current step: all ranks' rows, the position after them, and the next micro-batch.
        self._step_rows: list[tuple[int, Row]] = []
        self._step_end = self._position
        self._micro_batch = 0

    def __iter__(self) -> Iterator[Batch]:
        """Return the loader itself: iteration continues from the current position and never ends."""
        return self

    def __next__(self) -> Batch:
        """Return the next micro-batch of this data rank, complete and unpacked; training uses ``take`` instead."""
        rows = [row for _, row in self._next_rows()]
        batch = self._sides.batch(rows)
        self._advance()
        return batch.unpack()

    def take(self, place: Place, place_source: Place | None = None) -> Taken:
        """Return this rank's share of the next micro-batch, at ``place`` and for sources at ``place_source``.

        Only that share is read. The result is bitwise equal to splitting the micro-batch of ``next``.
        """
        taken = self._read(self._next_rows(), place, place_source)
        self._advance()
        return taken

    def claim(self) -> Callable[..., Taken]:
        """Return a thread-safe function that reads the next micro-batch as ``take`` does, and advance the loader."""
        rows = self._next_rows()
        self._advance()
        return partial(self._read, rows)

    def _read(self, rows: Sequence[tuple[int, Row]], place: Place, place_source: Place | None = None) -> Taken:
        share, documents, source_lengths = self._sides.share([row for _, row in rows], place, place_source)
        return Taken(share, documents, tuple(number for number, _ in rows), source_lengths)

    @property
    def shards(self) -> ShardSet:
        """The first folder, for values that all folders share: the tokenizer and the padding."""
        return self.folders[0]

    @property
    def micro_batches_per_step(self) -> int:
        """Number of micro-batches that this rank takes for one step."""
        return len(self.micro_batches)

    @property
    def epoch(self) -> int:
        """Epoch in which the next step begins, from 0."""
        return self._position.epoch

    @property
    def rows_consumed(self) -> int:
        """Number of rows of all completed steps, over all ranks."""
        return self._position.rows_consumed

    @property
    def tokens_consumed(self) -> int:
        """Number of tokens of all completed steps, over all ranks, without padding."""
        return self._position.tokens_consumed

    def next_documents(self) -> list[PackedDocuments]:
        """Return the documents of each micro-batch of this data rank's next step, without reading tokens."""
        assert self._micro_batch == 0, "within a step"
        placed = self._placed_rows()
        dealt = [self.micro_batches.rows(number, self._data_rank) for number in range(len(self.micro_batches))]
        return [self._sides.layout([row for _, row in placed[own.start : own.stop]]) for own in dealt]

    def forecast(self, steps: int) -> Forecast | None:
        """Return the forecast of a mixture's sources over the next steps; None for a single folder."""
        if isinstance(self._order, MixedOrder):
            return self._order.forecast(self._position, steps * self._rows_per_step)
        return None

    def pack_report(self) -> PackReport:
        """Return rows, padding, cuts and truncation of the current epoch: an estimate if it has several blocks."""
        return self._order.report(self._position)

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the last step as plain JSON: equal on all ranks, loadable with any number."""
        return self._order.state(self._position)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which ``state`` was taken; raise ``DataError`` if its data or order differs."""
        self._position = self._order.read(state)
        # The state determines the segments used for fill-in-the-middle.
        self._sides = replace(self._sides, documents=documents_in(self.folders, self._order.fims))
        # An unfinished step is read again from its first micro-batch.
        self._micro_batch = 0

    def _placed_rows(self) -> list[tuple[int, Row]]:
        """Return the rows of the next step with their numbers, in the order in which micro-batches take them."""
        rows, self._step_end = self._order.rows(self._position, self._rows_per_step)
        if self._cost is None:
            return list(enumerate(rows))
        costs = [self._cost(*lengths) for lengths in self._sides.lengths(rows)]
        places = balanced(costs, self.micro_batches, lockstep=self._lockstep)
        return [(number, rows[number]) for number in places]

    def _next_rows(self) -> list[tuple[int, Row]]:
        """Return the rows of this data rank's next micro-batch."""
        if self._micro_batch == 0:
            self._step_rows = self._placed_rows()
        own = self.micro_batches.rows(self._micro_batch, self._data_rank)
        return self._step_rows[own.start : own.stop]

    def _advance(self) -> None:
        """Advance to the next micro-batch, or after the last one to the next step; call only after reading all rows."""
        self._micro_batch += 1
        if self._micro_batch == self.micro_batches_per_step:
            self._position = self._step_end
            self._micro_batch = 0


Rows = FirstRows | list[Row]
"""Rows by their numbers."""


class ValidationLoader:
    """A fixed number of rows in a fixed order, for one data rank; built by ``build_validation_loader``."""

    def __init__(
        self,
        folders: Sequence[ShardSet],
        rows: Rows,
        *,
        seq_len: int,
        micro_batch_rows: int,
        data_rank: int,
        data_degree: int,
        even: bool = False,
        source_names: tuple[str, ...] = (),
        masking: Masking | None = None,
        source_seq_len: int = 0,
        **of_sides: Any,
    ) -> None:
        """Initialize the loader; ``rows`` number the documents of all ``folders`` as ``Corpus`` does."""
        self.folders = tuple(folders)
        """What is read. One tokenizer made them all."""
        self.source_names = source_names
        """What a mixture calls each folder; empty where one folder is read by itself."""
        self._rows = rows
        self._sides = Sides(documents_in(folders), seq_len, masking, source_seq_len, **of_sides)
        self.seq_len = seq_len
        # Rounded up, so that the last rows are never dropped.
        unit = data_degree
        if not even:
            unit *= micro_batch_rows
        count = -(-len(rows) // unit) * unit
        self._micro_batches = MicroBatches.deal(count, most_rows=micro_batch_rows, data_degree=data_degree)
        self._data_rank = data_rank

    @property
    def shards(self) -> ShardSet:
        """The first folder, for values that all folders share: the tokenizer and the padding."""
        return self.folders[0]

    @property
    def num_rows(self) -> int:
        """Number of rows with text, over all ranks."""
        return len(self._rows)

    def segments(self, row: int) -> list[tuple[np.ndarray, int, int]]:
        """Return the two-segment examples of a row: unmasked tokens, first token of the second segment, and order."""
        return self._sides.segments(self._rows[row])

    @cached_property
    def bytes_per_token(self) -> float | None:
        """Mean bytes of text per token of these rows, from the folders' own means; None if unknown.

        It is unknown for conversations: the mean is over all tokens, the loss over the counted ones only. Also for
        masked tokens, which are predicted from both sides, and for examples made from texts, whose targets are half
        sentinels.
        """
        sides = self._sides
        if sides.masking is not None or sides.recipe is not None or any(shards.is_masked for shards in self.folders):
            return None
        means = [shards.manifest.bytes_per_token for shards in self.folders]
        if len(means) == 1:
            return means[0]
        corpus, tokens = Corpus(self.folders), [0] * len(means)
        for number in range(len(self._rows)):
            for document, start, stop in self._rows[number]:
                tokens[corpus.folder_of(document)] += stop - start
        if None in means or not sum(tokens):
            return None
        return sum(mean * count for mean, count in zip(means, tokens, strict=True) if mean) / sum(tokens)

    def __len__(self) -> int:
        """Return the number of micro-batches on each rank, the same everywhere."""
        return len(self._micro_batches)

    def __iter__(self) -> Iterator[Batch]:
        """Yield this rank's micro-batches, from the first row each time."""
        for number in range(len(self)):
            yield self._sides.batch(self._rows_of(number)).unpack()

    def shares(self, place: Place, place_source: Place | None = None) -> Iterator[CompactBatch]:
        """Yield this rank's share of each micro-batch, at ``place`` and for sources at ``place_source``.

        Only these shares are read.
        """
        for number in range(len(self)):
            yield self._sides.share(self._rows_of(number), place, place_source)[0]

    def _rows_of(self, number: int) -> list[Row]:
        rows: list[Row] = []
        for row in self._micro_batches.rows(number, self._data_rank):
            # Every rank takes part in every collective, so a rank without rows gets padding rows.
            found = Row()
            if row < len(self._rows):
                found = self._rows[row]
            rows.append(found)
        return rows


def _opener(*, verify: bool) -> Open:
    if verify:
        return open_verified
    return partial(ShardSet.open, verify=False)


def _opened(folder: str | Location | ShardSet, open_folder: Open) -> ShardSet:
    """Return the opened shard folder; raise ``DataError`` if it has no documents."""
    shards = folder
    if not isinstance(shards, ShardSet):
        shards = open_folder(shards)
    if not shards.num_documents:
        raise DataError(f"{shards.folder} holds no documents. Build it again from a source with text.")
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
            f"rows_per_step={rows_per_step} does not divide among data_degree={data_degree} ranks. "
            f"Try rows_per_step={nearest}."
        )
