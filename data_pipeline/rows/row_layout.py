"""``RowLayout``: positions of pieces in several concatenated rows, with the padding between them."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from data_pipeline.rows.pack import Piece, Row
from longctx.batch import PackedDocuments

Held = tuple[int, int, int]
"""Document number, its first token in a span, and the end token (exclusive)."""


@dataclass(slots=True)
class RowLayout:
    """All rows' pieces in sequence, with padding pieces at row ends."""

    documents: PackedDocuments
    """Piece boundaries among the tokens of all rows."""
    rows: Sequence[Row]
    first_pieces: list[int]
    """Each row's first piece number, followed by the total piece count."""

    @property
    def padding(self) -> tuple[int, ...]:
        """Numbers of the padding pieces."""
        return self.documents.padding or ()

    @classmethod
    def of(cls, rows: Sequence[Row], seq_len: int, *, of_pairs: bool = False) -> RowLayout:
        """Return the layout for these rows.

        Rows of pairs always end with a padding piece, possibly empty, so that both sides have the same document count.
        """
        lengths: list[int] = []
        prefixes: list[int] = []
        first_pieces, padding = [0], []
        has_prefixes = any(row.prefixes for row in rows)
        for row in rows:
            if has_prefixes:
                prefixes += [number if number < 0 else first_pieces[-1] + number for number in row.prefixes]
            lengths += row.lengths
            missing = seq_len - sum(row.lengths)
            if missing or of_pairs:
                padding.append(len(lengths))
                lengths.append(missing)
                if has_prefixes:
                    prefixes.append(-1)
            first_pieces.append(len(lengths))
        return cls(PackedDocuments.of_lengths(lengths, tuple(padding), tuple(prefixes)), rows, first_pieces)

    def padded(self, documents: PackedDocuments) -> RowLayout:
        """Return the same layout with ``documents``, which may add padding after the rows."""
        if documents.padding is None:
            trailing = range(self.first_pieces[-1], documents.num_documents)
            documents = PackedDocuments(documents.bounds, (*self.padding, *trailing), documents.prefixes)
        return RowLayout(documents, self.rows, self.first_pieces)

    def wanted(self, runs: Iterable[list[Held]]) -> list[Piece]:
        """Return the pieces to read, span by span, each with one extra token."""
        bounds, wanted = self.documents.bounds, []
        for run in runs:
            # Current row, its first piece, and the next row's first piece.
            row, begin, next_first = Row(), 0, 0
            for number, first, last in run:
                if number >= next_first:
                    row, begin, next_first = self._row_of(number)
                place = number - begin
                # Pieces after the row's own are padding.
                if place < len(row.lengths):
                    # One token more than the span holds: the target for its last token.
                    offset = row.starts[place] - bounds[number]
                    wanted.append((row.documents[place], first + offset, last + offset + 1))
        return wanted

    def piece(self, number: int) -> tuple[int, int, int] | None:
        """Return a piece's document, start token and end token (exclusive); None for padding."""
        row, begin, _ = self._row_of(number)
        place = number - begin
        if place >= len(row.lengths):
            return None
        start = row.starts[place]
        return row.documents[place], start, start + row.lengths[place]

    def epoch(self, number: int) -> int:
        """Return the epoch in which a piece is read."""
        row, begin, _ = self._row_of(number)
        # A plan for a single epoch has no epochs per piece.
        if not row.epochs:
            return 0
        return row.epochs[number - begin]

    def _row_of(self, number: int) -> tuple[Row, int, int]:
        """Return a piece's row, the row's first piece, and the next row's first piece."""
        # Padding after the rows belongs to the last row.
        row = min(bisect.bisect_right(self.first_pieces, number), len(self.rows)) - 1
        next_first = self.first_pieces[row + 1] if row + 1 < len(self.rows) else self.documents.num_documents
        return self.rows[row], self.first_pieces[row], next_first

    def padding_id(self, number: int, padding: int) -> int:
        """Return the id that fills a padding piece: ``padding`` inside rows, 0 after them."""
        if number < self.first_pieces[-1]:
            return padding
        return 0
