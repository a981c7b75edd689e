"""Packing: assigns document pieces to rows, planned from lengths alone before any token is read.

The plan is a pure function of lengths, row length, seed, epoch and block. Only ``Packing``'s rules drop tokens.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np

from data_pipeline.rows.example_rule import ExampleRule
from data_pipeline.rows.fim import FimRule
from data_pipeline.shuffle import key64, shuffled
from longctx.errors import ConfigError
from longctx.integer_hash import mix64_array

Piece = tuple[int, int, int]
"""Document, start token, end token (exclusive)."""


class Row:
    """Concatenated document pieces; the rest of the row is padding.

    Stored as columns and not as a list of pieces: for a row with a million tokens a rank needs all pieces' lengths, but
    the documents and start tokens of only a few.
    """

    __slots__ = ("documents", "epochs", "lengths", "prefixes", "source_lengths", "starts")

    def __init__(self, documents: Sequence[int] = (), starts: Sequence[int] = (), lengths: Sequence[int] = ()) -> None:
        """Initialize with the pieces' documents, start tokens and token counts, all of equal length."""
        self.documents, self.starts, self.lengths = documents, starts, lengths
        self.epochs: Sequence[int] = ()
        """Epoch of each piece, set by the stream that yields the row; empty if every piece is in epoch 0."""
        self.source_lengths: Sequence[int] = ()
        """For pairs, source tokens per piece; sources are never cut."""
        self.prefixes: Sequence[int] = ()
        """Index of the piece that each piece continues, or -1 (``PackedDocuments.prefixes``); empty if none does."""

    @property
    def source(self) -> Row:
        """Row with the same pairs' sources."""
        row = Row(self.documents, [0] * len(self.documents), self.source_lengths)
        row.epochs = self.epochs
        return row

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Row:
        """Build a row from pieces."""
        columns = [*zip(*pieces, strict=True)] or [(), (), ()]
        documents, starts, ends = columns
        return cls(documents, starts, [stop - start for start, stop in zip(starts, ends, strict=True)])

    def __len__(self) -> int:
        """Return the number of pieces."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[Piece]:
        """Yield each piece."""
        for document, start, length in zip(self.documents, self.starts, self.lengths, strict=True):
            yield document, start, start + length

    def __eq__(self, other: object) -> bool:
        """Return whether both rows have the same pieces."""
        return isinstance(other, Row) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType], columns may change

    def __repr__(self) -> str:
        """Return an expression that builds the row."""
        return f"Row.of({list(self)})"


OPEN_ROWS = 128
"""Rows kept open for best fit. 64 were as tight as sorting the whole corpus (padding at most 0.4 % at 1M tokens)."""

# Salts that make an epoch's random draws independent: document shuffle, row shuffle (one salt per epoch block) and
# upsampling copies. Like salt 0 in ``rows.epoch_blocks``, they are part of the plan version.
_DOCUMENTS, _FIRST_ROWS, _COPIES = 1, 2, 3

_COPY_BIT = 48
"""Bit position above any document number: copies of a document get separate hashes and so separate positions."""


@dataclass(frozen=True)
class Parts:
    """Packing input: document part ``i`` is tokens ``starts[i]`` to ``ends[i]`` of ``documents[i]``. All int64."""

    documents: np.ndarray
    copies: np.ndarray
    """0 for a document's first copy, 1 for the second …: upsampling may repeat a document (``copies_of``)."""
    starts: np.ndarray
    ends: np.ndarray
    source_lengths: np.ndarray | None = None
    """For pairs, source tokens per document part; for preferences, prompt tokens. The parts are then complete
    documents."""

    @classmethod
    def whole(cls, documents: np.ndarray, lengths: np.ndarray, source_lengths: np.ndarray | None = None) -> Parts:
        """Return these documents uncut, one copy each."""
        zeros = np.zeros(len(documents), np.int64)
        return cls(documents, zeros, zeros, lengths, source_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document part."""
        return self.ends - self.starts

    def at(self, numbers: np.ndarray) -> Parts:
        """Return the document parts with these indices, in the given order."""
        of_sources = self.source_lengths
        if of_sources is not None:
            of_sources = of_sources[numbers]
        return Parts(
            self.documents[numbers], self.copies[numbers], self.starts[numbers], self.ends[numbers], of_sources
        )

    def joined(self) -> Parts:
        """Return the same tokens in ascending order, with adjacent parts from one document copy merged."""
        if not len(self.documents):
            return self
        parts = self.at(np.lexsort((self.starts, self.copies, self.documents)))
        is_adjacent = (
            (parts.documents[1:] == parts.documents[:-1])
            & (parts.copies[1:] == parts.copies[:-1])
            & (parts.starts[1:] == parts.ends[:-1])
        )
        # True at boundaries between document parts that do not continue each other.
        first_parts, lasts = (
            parts.at(np.flatnonzero(np.append(True, ~is_adjacent))),
            np.flatnonzero(np.append(~is_adjacent, True)),
        )
        return replace(first_parts, ends=parts.ends[lasts])


Kind = Literal["best_fit", "concatenate", "one_document"]


@dataclass(frozen=True)
class Packing:
    """Rule for packing documents into rows."""

    kind: Kind = "best_fit"
    """``best_fit`` or a baseline. ``concatenate``: documents are laid end to end and cut at every row end.
    ``one_document``: one piece per row, then padding."""
    min_rest_tokens: int = 1
    """Drop a cut document's last piece if it has fewer tokens: 1 keeps every piece, the row length drops every one."""
    fim: FimRule | None = None
    """Fill-in-the-middle rule: which documents, and how."""
    examples: ExampleRule | None = None
    """Rule for examples made from texts; None: texts are read unchanged."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"data.packing={self.kind!r} must be one of {', '.join(get_args(Kind))}.")
        if self.min_rest_tokens < 1:
            raise ConfigError(f"data.min_rest_tokens={self.min_rest_tokens} must be at least 1 (1 keeps every rest).")
        if self.kind == "concatenate" and self.min_rest_tokens > 1:
            raise ConfigError(
                f"data.min_rest_tokens={self.min_rest_tokens} does not apply to data.packing=concatenate, which "
                "cuts documents at every row end. Leave it out, or use best_fit."
            )

    def __str__(self) -> str:
        """Return the rule as recorded in the loader state."""
        text: str = self.kind
        if self.min_rest_tokens > 1:
            text += f", rests of at least {self.min_rest_tokens}"
        # With a rate of 0 the rule only applies to mixture sources, whose states record their own rules.
        if self.fim is not None and self.fim.rate:
            text += f", {self.fim}"
        if self.examples is not None:
            text += f", {self.examples}"
        return text

    def check_fim(self, rule: FimRule, row_lengths: Sequence[int]) -> None:
        """Raise ConfigError if rows of these lengths would cut fill-in-the-middle segments."""
        if not rule.rate:
            return
        if self.kind == "concatenate":
            raise ConfigError(
                f"data.packing=concatenate cuts documents at every row end, but fill-in-the-middle (a rate of "
                f"{rule.rate:g}) must keep a middle in one row with its prefix and suffix.\n"
                "Use best_fit or one_document, or set data.fim_rate=0 (fim_rate of a mixture's sources)."
            )
        rule.check_rows(row_lengths)


BEST_FIT = Packing()


@dataclass(frozen=True)
class RowPlan:
    """Rows as consecutive pieces: row ``r`` has pieces ``row_offsets[r]`` to ``row_offsets[r + 1]``."""

    seq_len: int
    pieces: Parts
    row_offsets: np.ndarray
    num_documents: int
    """Documents in the plan."""
    document_tokens: int
    """Tokens in these documents; all of them are in rows unless a rule drops some."""
    num_cut: int
    """Documents that no single row contains completely."""
    examples: ExampleRule | None = None
    """Rule for examples made from the pieces; then the examples, not the pieces, fill the rows."""

    @property
    def num_rows(self) -> int:
        """Rows in the plan."""
        return len(self.row_offsets) - 1

    @property
    def row_tokens(self) -> np.ndarray:
        """Tokens per row, without padding."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._tokens_of(self.pieces.lengths))])
        return np.diff(ends[self.row_offsets])

    @cached_property
    def taken(self) -> int:
        """Tokens in all rows, without padding."""
        return int(self._tokens_of(self.pieces.lengths).sum())

    def _tokens_of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the row tokens that pieces of these lengths take."""
        if self.examples is None:
            return lengths
        return self.examples.lengths(lengths)

    def row(self, index: int) -> Row:
        """Return one row."""
        return self.rows(index, index + 1)[0][0]

    def rows(self, first: int, stop: int) -> tuple[list[Row], int]:
        """Return rows ``first`` to ``stop`` (exclusive) and their token count without padding."""
        ends = self.row_offsets[first : stop + 1].tolist()
        begin = ends[0]
        documents, starts, lengths = self._columns
        # Slice once for all rows: a step may have hundreds of short ones.
        sizes = lengths[begin : ends[-1]].tolist()
        rows = [
            Row(documents[start:end], starts[start:end], sizes[start - begin : end - begin])
            for start, end in pairwise(ends)
        ]
        of_sources = self.pieces.source_lengths
        if of_sources is not None:
            for row, (start, end) in zip(rows, pairwise(ends), strict=True):
                row.source_lengths = of_sources[start:end].tolist()
        return rows, int(self._tokens_of(np.asarray(lengths[begin : ends[-1]])).sum())

    @cached_property
    def _columns(self) -> tuple[memoryview, memoryview, memoryview]:
        """Documents, start tokens and lengths for all pieces, as memory views: cheap slices of Python integers."""
        return self.pieces.documents.data, self.pieces.starts.data, self.pieces.lengths.data

    def parts_from(self, row: int) -> Parts:
        """Return the document parts in row ``row`` and later, merged again if they were cut for these rows."""
        return self.pieces.at(np.arange(int(self.row_offsets[row]), len(self.pieces.starts))).joined()


def plan_parts(
    parts: Parts,
    seq_len: int,
    *,
    seed: int = 0,
    epoch: int = 0,
    block: int = 0,
    shuffle: bool = True,
    packing: Packing = BEST_FIT,
    open_rows: int = OPEN_ROWS,
    source_seq_len: int = 0,
) -> RowPlan:
    """Pack document parts (each with at least 1 token) into rows of at most ``seq_len`` tokens.

    Pairs are never cut: a row has at most ``source_seq_len`` source tokens, and a pair that exceeds a row is dropped.

    With ``shuffle``, a hash of (seed, epoch) orders the parts before packing, and then the rows.
    """
    assert min(seq_len, open_rows, int(parts.lengths.min(initial=1))) >= 1, "lengths and sizes are at least 1"
    if shuffle:
        # Shuffle before packing, so that each epoch combines different documents in its rows.
        parts = parts.at(shuffled(parts.documents | parts.copies << _COPY_BIT, seed, epoch, _DOCUMENTS))
    if packing.examples is not None:
        budgets = (seq_len, source_seq_len)
        part_indices, starts, ends, rows = _examples(parts.lengths, packing.examples, budgets, packing, open_rows)
    elif parts.source_lengths is None:
        part_indices, starts, ends, rows = _pieces(parts.lengths, seq_len, packing, open_rows)
    else:
        budgets = (seq_len, source_seq_len)
        part_indices, starts, ends, rows = _whole_pairs(
            parts.lengths, parts.source_lengths, budgets, packing, open_rows
        )
    num_rows = int(rows.max(initial=-1)) + 1
    if shuffle:
        # Shuffle the rows too: packing numbers them in opening order, which depends on piece lengths.
        rows = shuffled(np.arange(num_rows), seed, epoch, _FIRST_ROWS + block)[rows]
    pieces = parts.at(part_indices)
    pieces = replace(pieces, starts=pieces.starts + starts, ends=pieces.starts + ends)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows, minlength=num_rows))])
    return RowPlan(
        seq_len=seq_len,
        # A stable sort keeps a row's pieces in packing order.
        pieces=pieces.at(np.argsort(rows, kind="stable")),
        row_offsets=offsets,
        num_documents=len(parts.documents),
        document_tokens=int(parts.lengths.sum()),
        num_cut=_num_cut(parts, part_indices, ends - starts),
        examples=packing.examples,
    )


def _num_cut(parts: Parts, part_indices: np.ndarray, sizes: np.ndarray) -> int:
    """Count the document parts that no single row contains completely."""
    cut = len(np.unique(part_indices[sizes < parts.lengths[part_indices]]))
    if parts.source_lengths is None:
        return cut
    # A pair, or a record with preferences, is in one row or dropped.
    return len(parts.documents) - len(part_indices)


def _whole_pairs(
    lengths: np.ndarray, source_lengths: np.ndarray, budgets: tuple[int, int], packing: Packing, open_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return pieces as ``_pieces`` does, for pairs: all that fit into a row, uncut."""
    if packing.kind == "concatenate":
        raise ConfigError(
            "data.packing=concatenate cuts documents, but pairs must stay uncut. Use best_fit or one_document."
        )
    part_indices = np.flatnonzero((lengths <= budgets[0]) & (source_lengths <= budgets[1]))
    sizes = lengths[part_indices]
    zeros = np.zeros(len(part_indices), np.int64)
    if packing.kind == "one_document":
        return part_indices, zeros, sizes, np.arange(len(part_indices))
    openers = np.array(
        _best_fit_of_pairs(sizes.tolist(), source_lengths[part_indices].tolist(), budgets, open_rows), np.int64
    )
    opens_row = openers == np.arange(len(sizes))
    return part_indices, zeros, sizes, (np.cumsum(opens_row) - 1)[openers]


def _examples(
    lengths: np.ndarray, rule: ExampleRule, budgets: tuple[int, int], packing: Packing, open_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return pieces as ``_pieces`` does, for texts that become examples: rows are filled with example tokens."""
    if packing.kind == "concatenate":
        raise ConfigError(
            "data.packing=concatenate cuts documents, but examples made from texts must stay uncut.\n"
            "Use best_fit or one_document."
        )
    # Cut texts so that each piece's example fits into one row, then pack by the examples' lengths.
    part_indices, starts, ends = _cut(lengths, rule.most_tokens(*budgets))
    enough = ends - starts >= rule.least_tokens
    part_indices, starts, ends = part_indices[enough], starts[enough], ends[enough]
    # Preferences are not cut: a record that does not fit is dropped.
    fits = rule.lengths(ends - starts) <= budgets[0]
    part_indices, starts, ends = part_indices[fits], starts[fits], ends[fits]
    sizes, of_sources = rule.lengths(ends - starts), rule.source_lengths(ends - starts)
    if packing.kind == "one_document":
        return part_indices, starts, ends, np.arange(len(part_indices))
    if of_sources is None:
        return part_indices, starts, ends, _rows_of(sizes, budgets[0], open_rows)
    openers = np.array(_best_fit_of_pairs(sizes.tolist(), of_sources.tolist(), budgets, open_rows), np.int64)
    opens_row = openers == np.arange(len(sizes))
    return part_indices, starts, ends, (np.cumsum(opens_row) - 1)[openers]


def _pieces(
    lengths: np.ndarray, seq_len: int, packing: Packing, open_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return document pieces in order: document index, start, stop, and row, numbered in opening order."""
    if packing.kind == "concatenate":
        ends = np.cumsum(lengths)
        # A piece ends at each document end and at each row end.
        piece_ends = np.union1d(ends, np.arange(seq_len, int(ends[-1:].sum()), seq_len))
        starts = np.concatenate([np.zeros(1, np.int64), piece_ends[:-1]])[: len(piece_ends)]
        part_indices = np.searchsorted(ends, starts, side="right")
        before = (ends - lengths)[part_indices]
        return part_indices, starts - before, piece_ends - before, starts // seq_len
    part_indices, starts, piece_ends = _cut(lengths, seq_len)
    if packing.min_rest_tokens > 1:
        kept = (starts == 0) | (piece_ends - starts >= min(packing.min_rest_tokens, seq_len))
        part_indices, starts, piece_ends = part_indices[kept], starts[kept], piece_ends[kept]
    if packing.kind == "one_document":
        return part_indices, starts, piece_ends, np.arange(len(part_indices))
    return part_indices, starts, piece_ends, _rows_of(piece_ends - starts, seq_len, open_rows)


def _cut(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents, in order, into pieces of at most ``seq_len`` tokens: document index, start, stop."""
    # Round up: a document's remainder is a piece too.
    counts = -(-lengths // seq_len)
    part_indices = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(part_indices)) - first_piece) * seq_len
    return part_indices, starts, np.minimum(starts + seq_len, lengths[part_indices])


def _rows_of(sizes: np.ndarray, seq_len: int, open_rows: int) -> np.ndarray:
    """Return each piece's row, numbered in opening order."""
    # A piece that fills a row stays alone, so only the others need fitting.
    partial = np.flatnonzero(sizes < seq_len)
    openers = np.arange(len(sizes))
    openers[partial] = partial[_best_fit(sizes[partial].tolist(), seq_len, open_rows)]
    opens_row = openers == np.arange(len(sizes))
    return (np.cumsum(opens_row) - 1)[openers]


# Online best fit ("Fewer Truncations Improve Language Modeling", Ding et al., 2024, arXiv 2404.10830). A document
# longer than a row is first cut into full rows plus a remainder; remainders and short documents are then bin-packed, so
# only documents that exceed a row are ever cut. The paper sorts pieces by length (best-fit decreasing). We keep the
# shuffled order, which makes a row's composition random, and bound the open rows to ``open_rows``: each piece then
# costs one binary search and one insertion in a short list. Invariant: ``free`` is ascending, ``free[i] > 0``, and
# ``rows[i]`` is the opener of the row with ``free[i]`` tokens left.
def _best_fit(sizes: Sequence[int], seq_len: int, open_rows: int) -> list[int]:
    """Return, for each piece, the index of the piece that opened its row.

    A piece goes to the open row with the fewest free tokens that still holds it. If too many rows are open, the fullest
    one is closed: it is the least likely to fit another piece.
    """
    openers: list[int] = []
    # Parallel lists: free tokens per open row, ascending, and the piece that opened the row.
    free: list[int] = []
    rows: list[int] = []
    for piece, size in enumerate(sizes):
        fit = bisect.bisect_left(free, size)
        if fit < len(free):
            left = free.pop(fit) - size
            row = rows.pop(fit)
        else:
            left = seq_len - size
            row = piece
        openers.append(row)
        if left == 0:
            continue
        # Insert the row again so that ``free`` stays ascending.
        again = bisect.bisect_left(free, left)
        free.insert(again, left)
        rows.insert(again, row)
        if len(free) > open_rows:
            del free[0], rows[0]
    return openers


def _best_fit_of_pairs(
    sizes: Sequence[int], source_sizes: Sequence[int], budgets: tuple[int, int], open_rows: int
) -> list[int]:
    """Return openers as ``_best_fit`` does, with two budgets: a pair goes to the fitting row with the least room."""
    openers: list[int] = []
    # Open rows in ascending order of room (the sum of both budgets' free fractions): room, free target and source
    # tokens, and the piece that opened the row.
    rows: list[tuple[float, int, int, int]] = []
    for piece, (size, source_size) in enumerate(zip(sizes, source_sizes, strict=True)):
        # A row with less room than the pair takes cannot hold it; the margin covers rounding in the two divisions.
        first = bisect.bisect_left(rows, (size / budgets[0] + source_size / budgets[1] - 1e-9,))
        left, source_left, row = budgets[0], budgets[1], piece
        for number in range(first, len(rows)):
            _, free, source_free, opener = rows[number]
            if free >= size and source_free >= source_size:
                left, source_left, row = free, source_free, opener
                del rows[number]
                break
        openers.append(row)
        left, source_left = left - size, source_left - source_size
        # A pair has tokens on both sides, so a row without free tokens on one side is complete.
        if left and source_left:
            bisect.insort(rows, (left / budgets[0] + source_left / budgets[1], left, source_left, row))
        if len(rows) > open_rows:
            del rows[0]
    return openers


MAX_FACTOR = 1000.0


@dataclass(frozen=True, kw_only=True)
class Upsampling:
    """Rule that repeats documents with at least ``min_tokens`` tokens ``factor`` times per epoch, on average."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012, a mixture's file has nothing else

    min_tokens: int
    factor: float
    """2.5: two or three copies, drawn per document and epoch. Below 1, some documents are left out of an epoch."""


def copies_of(parts: Parts, rules: tuple[Upsampling, ...], *, seed: int, epoch: int) -> Parts:
    """Repeat documents according to the rules, with copies adjacent; the last rule that matches a document applies."""
    factors = np.ones(len(parts.documents))
    for rule in rules:
        factors[parts.lengths >= rule.min_tokens] = rule.factor
    # Use the top 53 bits, which a float holds exactly, so that every machine draws the same copies.
    random_bits = mix64_array(parts.documents.astype(np.uint64) ^ np.uint64(key64(seed, epoch, _COPIES))) >> np.uint64(
        11
    )
    counts = np.floor(factors).astype(np.int64)
    counts += random_bits < (factors - counts) * 2.0**53
    numbers = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    found = parts.at(numbers)
    return replace(found, copies=np.arange(len(numbers)) - first)
