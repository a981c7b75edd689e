"""Packing: assignment of pieces of documents to rows, planned from lengths alone, before a token is read.

Documents longer than a row are cut into contiguous rows. Their remainders and short documents are packed by online best
fit ("Fewer Truncations Improve Language Modeling", Ding et al., 2024, arXiv 2404.10830), unless ``Packing`` sets
another method. Tokens are dropped only if it says so. The plan is a pure function of lengths, row length, seed, epoch
and block.
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
from longctx.mixing import mix64_array

Piece = tuple[int, int, int]
"""Document, first token, and the one behind the last."""


class Row:
    """Concatenated pieces of documents; the remainder of a row's length is padding.

    Stored as columns rather than a list of pieces: for a row of a million tokens a rank needs the lengths of all
    pieces, but the documents and first tokens of only a few.
    """

    __slots__ = ("documents", "epochs", "lengths", "source_lengths", "starts")

    def __init__(self, documents: Sequence[int] = (), starts: Sequence[int] = (), lengths: Sequence[int] = ()) -> None:
        """Initialize with the pieces' documents, first tokens and token counts, all of equal length."""
        self.documents, self.starts, self.lengths = documents, starts, lengths
        self.epochs: Sequence[int] = ()
        """Of each piece, that it is read in; the stream that gives the row says so. Empty: all in the first."""
        self.source_lengths: Sequence[int] = ()
        """Of pairs the tokens of each piece's source, which is whole."""

    @property
    def source(self) -> Row:
        """The row of the pairs' other sides."""
        row = Row(self.documents, [0] * len(self.documents), self.source_lengths)
        row.epochs = self.epochs
        return row

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Row:
        """Return the row of these pieces."""
        columns = [*zip(*pieces, strict=True)] or [(), (), ()]
        documents, starts, stops = columns
        return cls(documents, starts, [stop - start for start, stop in zip(starts, stops, strict=True)])

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

# Salts that make an epoch's random draws independent: the shuffles of documents and of each block's rows
# (one salt per block), and the draw of copies. Part of the plan's version, as is the 0 of
# ``rows.blocks``.
_DOCUMENTS, _FIRST_ROWS, _COPIES = 1, 2, 3


_COPY_BIT = 48
"""Above the number of any document: copies of one get hashes, and so places, of their own."""


@dataclass(frozen=True)
class Parts:
    """Input of packing: part ``i`` is tokens ``starts[i]`` to ``stops[i]`` of ``documents[i]``. Arrays int64."""

    documents: np.ndarray
    copies: np.ndarray
    """0 of a document's first copy, 1 of its second …: an epoch may have some more than once (``copies_of``)."""
    starts: np.ndarray
    stops: np.ndarray
    source_lengths: np.ndarray | None = None
    """Of pairs the tokens of each one's source; they are whole documents then."""

    @classmethod
    def whole(cls, documents: np.ndarray, lengths: np.ndarray, source_lengths: np.ndarray | None = None) -> Parts:
        """Return these documents in full, each once."""
        zeros = np.zeros(len(documents), np.int64)
        return cls(documents, zeros, zeros, lengths, source_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Number of tokens of each part."""
        return self.stops - self.starts

    def at(self, numbers: np.ndarray) -> Parts:
        """Return the parts with these numbers, in the given order."""
        of_sources = self.source_lengths
        if of_sources is not None:
            of_sources = of_sources[numbers]
        return Parts(
            self.documents[numbers], self.copies[numbers], self.starts[numbers], self.stops[numbers], of_sources
        )

    def joined(self) -> Parts:
        """Return the same tokens in ascending order, with adjacent pieces of one document copy merged into one part."""
        if not len(self.documents):
            return self
        parts = self.at(np.lexsort((self.starts, self.copies, self.documents)))
        goes_on = (
            (parts.documents[1:] == parts.documents[:-1])
            & (parts.copies[1:] == parts.copies[:-1])
            & (parts.starts[1:] == parts.stops[:-1])
        )
        # Boundaries between parts that do not continue each other.
        firsts, lasts = parts.at(np.flatnonzero(np.append(True, ~goes_on))), np.flatnonzero(np.append(~goes_on, True))
        return replace(firsts, stops=parts.stops[lasts])


Kind = Literal["best_fit", "concatenate", "one_document"]


@dataclass(frozen=True)
class Packing:
    """Rule for packing documents into rows."""

    kind: Kind = "best_fit"
    """``concatenate``: laid end to end and cut wherever a row ends, which is what others are measured against.
    ``one_document``: each row has one piece, and padding."""
    min_rest_tokens: int = 1
    """The last piece of a document that was cut is left out where it has fewer tokens: 1 leaves out none, the length of
    a row all."""
    fim: FimRule | None = None
    """Which documents are filled in in their middle, and how."""
    examples: ExampleRule | None = None
    """What examples are made of texts, if they are not read as they are."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ConfigError(f"data.packing={self.kind!r} must be one of {', '.join(get_args(Kind))}.")
        if self.min_rest_tokens < 1:
            raise ConfigError(
                f"data.min_rest_tokens={self.min_rest_tokens} must be at least 1, which keeps every rest."
            )
        if self.kind == "concatenate" and self.min_rest_tokens > 1:
            raise ConfigError(
                f"data.min_rest_tokens={self.min_rest_tokens} needs documents with rests: data.packing=concatenate "
                "cuts wherever a row ends. Leave it out, or pack by best_fit."
            )

    def __str__(self) -> str:
        """Return the rule as recorded in a loader's state."""
        said: str = self.kind
        if self.min_rest_tokens > 1:
            said += f", rests of at least {self.min_rest_tokens}"
        # With a rate of 0 it is there only for a mixture's sources, whose states record their own rules.
        if self.fim is not None and self.fim.rate:
            said += f", {self.fim}"
        if self.examples is not None:
            said += f", {self.examples}"
        return said

    def check_fim(self, rule: FimRule, row_lengths: Sequence[int]) -> None:
        """Raise ConfigError if rows of these lengths would cut fill-in-the-middle segments."""
        if not rule.rate:
            return
        if self.kind == "concatenate":
            raise ConfigError(
                f"data.packing=concatenate cuts documents wherever a row ends; of those that are filled in (a rate of "
                f"{rule.rate:g}) a middle would stand in another row than its prefix or suffix.\n"
                "Pack by best_fit or one_document, or set data.fim_rate=0 (fim_rate of a mixture's sources)."
            )
        rule.check_rows(row_lengths)


BEST_FIT = Packing()


@dataclass(frozen=True)
class RowPlan:
    """Rows as runs of pieces: row ``r`` has pieces ``row_offsets[r]`` to ``row_offsets[r + 1]``."""

    seq_len: int
    pieces: Parts
    row_offsets: np.ndarray
    num_documents: int
    """Documents that were planned."""
    document_tokens: int
    """Their tokens, all of which stand in rows unless rests are left out."""
    num_cut: int
    """Documents of which no row has all."""
    examples: ExampleRule | None = None
    """What examples are made of the pieces; they, and not the pieces, fill the rows then."""

    @property
    def num_rows(self) -> int:
        """Number of rows of the plan."""
        return len(self.row_offsets) - 1

    @property
    def row_tokens(self) -> np.ndarray:
        """Number of tokens of each row, without padding."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self._tokens_of(self.pieces.lengths))])
        return np.diff(ends[self.row_offsets])

    @cached_property
    def taken(self) -> int:
        """Number of tokens of all rows, without padding."""
        return int(self._tokens_of(self.pieces.lengths).sum())

    def _tokens_of(self, lengths: np.ndarray) -> np.ndarray:
        """Return the number of tokens in a row for pieces of these lengths."""
        if self.examples is None:
            return lengths
        return self.examples.lengths(lengths)

    def row(self, index: int) -> Row:
        """Return one row."""
        return self.rows(index, index + 1)[0][0]

    def rows(self, first: int, stop: int) -> tuple[list[Row], int]:
        """Return rows ``first`` to ``stop`` (exclusive), and their tokens without padding."""
        ends = self.row_offsets[first : stop + 1].tolist()
        begin = ends[0]
        documents, starts, lengths = self._columns
        # All rows at once: a step may have hundreds of short ones.
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
        """Documents, first tokens and lengths of all pieces, as memory views with cheap slices and plain integers."""
        return self.pieces.documents.data, self.pieces.starts.data, self.pieces.lengths.data

    def parts_from(self, row: int) -> Parts:
        """Return the parts in this row and later ones, rejoined if they were cut for these rows."""
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
    """Pack parts of documents (all of at least 1 token) into rows of at most ``seq_len`` tokens.

    Pairs are never cut, and a row has at most ``source_seq_len`` tokens of sources; a pair that exceeds a row is
    dropped.

    With ``shuffle``, a hash of (seed, epoch) orders the parts before they are packed, and then the rows. Without it,
    both keep the order of the parts.
    """
    assert min(seq_len, open_rows, int(parts.lengths.min(initial=1))) >= 1, "lengths and sizes are at least 1"
    if shuffle:
        # Packed in shuffled order, so that each epoch combines different documents in its rows.
        parts = parts.at(shuffled(parts.documents | parts.copies << _COPY_BIT, seed, epoch, _DOCUMENTS))
    if packing.examples is not None:
        budgets = (seq_len, source_seq_len)
        owners, starts, stops, rows = _examples(parts.lengths, packing.examples, budgets, packing, open_rows)
    elif parts.source_lengths is None:
        owners, starts, stops, rows = _pieces(parts.lengths, seq_len, packing, open_rows)
    else:
        budgets = (seq_len, source_seq_len)
        owners, starts, stops, rows = _whole_pairs(parts.lengths, parts.source_lengths, budgets, packing, open_rows)
    num_rows = int(rows.max(initial=-1)) + 1
    if shuffle:
        # Rows are numbered in the order of opening, which depends on their pieces' lengths.
        rows = shuffled(np.arange(num_rows), seed, epoch, _FIRST_ROWS + block)[rows]
    pieces = parts.at(owners)
    pieces = replace(pieces, starts=pieces.starts + starts, stops=pieces.starts + stops)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.bincount(rows, minlength=num_rows))])
    return RowPlan(
        seq_len=seq_len,
        # Stable: the pieces of a row stay in the order in which they were packed.
        pieces=pieces.at(np.argsort(rows, kind="stable")),
        row_offsets=offsets,
        num_documents=len(parts.documents),
        document_tokens=int(parts.lengths.sum()),
        num_cut=_num_cut(parts, owners, stops - starts),
        examples=packing.examples,
    )


def _num_cut(parts: Parts, owners: np.ndarray, sizes: np.ndarray) -> int:
    """Return the number of parts that are not contained in a single row."""
    cut = len(np.unique(owners[sizes < parts.lengths[owners]]))
    if parts.source_lengths is None:
        return cut
    # Pairs are complete, or in no row.
    return len(parts.documents) - len(owners)


def _whole_pairs(
    lengths: np.ndarray, source_lengths: np.ndarray, budgets: tuple[int, int], packing: Packing, open_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return pieces as ``_pieces`` does, for pairs: all that fit into a row, uncut."""
    if packing.kind == "concatenate":
        raise ConfigError("data.packing=concatenate cuts documents, and pairs are whole. Use best_fit or one_document.")
    owners = np.flatnonzero((lengths <= budgets[0]) & (source_lengths <= budgets[1]))
    sizes = lengths[owners]
    zeros = np.zeros(len(owners), np.int64)
    if packing.kind == "one_document":
        return owners, zeros, sizes, np.arange(len(owners))
    openers = np.array(
        _best_fit_of_pairs(sizes.tolist(), source_lengths[owners].tolist(), budgets, open_rows), np.int64
    )
    opens_row = openers == np.arange(len(sizes))
    return owners, zeros, sizes, (np.cumsum(opens_row) - 1)[openers]


def _examples(
    lengths: np.ndarray, rule: ExampleRule, budgets: tuple[int, int], packing: Packing, open_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return pieces as ``_pieces`` does, for texts that become examples: rows have room for the examples."""
    if packing.kind == "concatenate":
        raise ConfigError(
            "data.packing=concatenate cuts wherever a row ends, and an example that is made of a text is whole.\n"
            "Use best_fit or one_document."
        )
    owners, starts, stops = _cut(lengths, rule.most_tokens(*budgets))
    enough = stops - starts >= rule.least_tokens
    owners, starts, stops = owners[enough], starts[enough], stops[enough]
    sizes, of_sources = rule.lengths(stops - starts), rule.source_lengths(stops - starts)
    if packing.kind == "one_document":
        return owners, starts, stops, np.arange(len(owners))
    if of_sources is None:
        return owners, starts, stops, _rows_of(sizes, budgets[0], open_rows)
    openers = np.array(_best_fit_of_pairs(sizes.tolist(), of_sources.tolist(), budgets, open_rows), np.int64)
    opens_row = openers == np.arange(len(sizes))
    return owners, starts, stops, (np.cumsum(opens_row) - 1)[openers]


def _pieces(
    lengths: np.ndarray, seq_len: int, packing: Packing, open_rows: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return documents in order as pieces: document index, start, stop, and row, numbered in the order of opening."""
    if packing.kind == "concatenate":
        ends = np.cumsum(lengths)
        # A piece ends where its document or a row does.
        stops = np.union1d(ends, np.arange(seq_len, int(ends[-1:].sum()), seq_len))
        starts = np.concatenate([np.zeros(1, np.int64), stops[:-1]])[: len(stops)]
        owners = np.searchsorted(ends, starts, side="right")
        before = (ends - lengths)[owners]
        return owners, starts - before, stops - before, starts // seq_len
    owners, starts, stops = _cut(lengths, seq_len)
    if packing.min_rest_tokens > 1:
        kept = (starts == 0) | (stops - starts >= min(packing.min_rest_tokens, seq_len))
        owners, starts, stops = owners[kept], starts[kept], stops[kept]
    if packing.kind == "one_document":
        return owners, starts, stops, np.arange(len(owners))
    return owners, starts, stops, _rows_of(stops - starts, seq_len, open_rows)


def _cut(lengths: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return documents in order as pieces of at most ``seq_len``: document index, start, stop."""
    # Rounded up: the remainder of a document is a piece too.
    counts = -(-lengths // seq_len)
    owners = np.repeat(np.arange(len(lengths)), counts)
    first_piece = np.repeat(np.cumsum(counts) - counts, counts)
    starts = (np.arange(len(owners)) - first_piece) * seq_len
    return owners, starts, np.minimum(starts + seq_len, lengths[owners])


def _rows_of(sizes: np.ndarray, seq_len: int, open_rows: int) -> np.ndarray:
    """Return the row of each piece, numbered in the order of opening."""
    # A piece that fills a row is alone in it: only the others have to be fitted.
    partial = np.flatnonzero(sizes < seq_len)
    openers = np.arange(len(sizes))
    openers[partial] = partial[_best_fit(sizes[partial].tolist(), seq_len, open_rows)]
    opens_row = openers == np.arange(len(sizes))
    return (np.cumsum(opens_row) - 1)[openers]


def _best_fit(sizes: Sequence[int], seq_len: int, open_rows: int) -> list[int]:
    """Return for each piece the number of the piece that opened its row.

    A piece goes to the open row with the fewest free tokens that still holds it. When too many rows are open, the
    fullest is closed: it is the least likely to fit another piece.
    """
    openers: list[int] = []
    # Parallel lists: free tokens of the open rows, ascending, and the piece that opened each row.
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
        # Reinsert the row so that the list of free tokens stays ascending.
        again = bisect.bisect_left(free, left)
        free.insert(again, left)
        rows.insert(again, row)
        # The fullest row is first.
        if len(free) > open_rows:
            del free[0], rows[0]
    return openers


def _best_fit_of_pairs(
    sizes: Sequence[int], source_sizes: Sequence[int], budgets: tuple[int, int], open_rows: int
) -> list[int]:
    """Return openers as ``_best_fit`` does, with two budgets: a pair goes to the fitting row with the least room.

    Room is the sum of the free shares of both budgets.
    """
    openers: list[int] = []
    # Open rows sorted by room: room, free tokens of both sides, and the piece that opened the row.
    rows: list[tuple[float, int, int, int]] = []
    for piece, (size, source_size) in enumerate(zip(sizes, source_sizes, strict=True)):
        # A row with less room than the pair takes cannot hold it.
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
        # A pair has tokens on both sides.
        if left and source_left:
            bisect.insort(rows, (left / budgets[0] + source_left / budgets[1], left, source_left, row))
        if len(rows) > open_rows:
            del rows[0]
    return openers


MAX_FACTOR = 1000.0


@dataclass(frozen=True, kw_only=True)
class Upsampling:
    """Rule that repeats documents of at least ``min_tokens`` tokens ``factor`` times per epoch, on average."""

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012, a mixture's file has nothing else

    min_tokens: int
    factor: float
    """2.5: two or three times, by a draw for each document and epoch. Below 1, some are left out of an epoch."""


def copies_of(parts: Parts, rules: tuple[Upsampling, ...], *, seed: int, epoch: int) -> Parts:
    """Repeat documents according to the rules, with copies adjacent; the last rule that matches a document applies.

    A pure function of document, length, seed and epoch, like the rest of a plan.
    """
    factors = np.ones(len(parts.documents))
    for rule in rules:
        factors[parts.lengths >= rule.min_tokens] = rule.factor
    # The top 53 bits, which a float holds exactly: the same draw on every machine.
    draws = mix64_array(parts.documents.astype(np.uint64) ^ np.uint64(key64(seed, epoch, _COPIES))) >> np.uint64(11)
    counts = np.floor(factors).astype(np.int64)
    counts += draws < (factors - counts) * 2.0**53
    numbers = np.repeat(np.arange(len(counts)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    found = parts.at(numbers)
    return replace(found, copies=np.arange(len(numbers)) - first)
