"""``Row``: which pieces of documents stand in one row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

Piece = tuple[int, int, int]
"""Document, first token, and the one behind the last."""


class Row:
    """Pieces of documents, laid end to end; what is missing to a row's length is padding.

    Columns rather than a list of pieces: of a row of a million tokens a rank needs the lengths of all its pieces, and
    documents and first tokens of a few.
    """

    __slots__ = ("documents", "lengths", "starts")

    def __init__(self, documents: Sequence[int] = (), starts: Sequence[int] = (), lengths: Sequence[int] = ()) -> None:
        """The pieces' documents, first tokens and numbers of tokens, all as many."""
        self.documents, self.starts, self.lengths = documents, starts, lengths

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Row:
        """The row of these pieces."""
        columns = [*zip(*pieces, strict=True)] or [(), (), ()]
        documents, starts, stops = columns
        return cls(documents, starts, [stop - start for start, stop in zip(starts, stops, strict=True)])

    def __len__(self) -> int:
        """Pieces."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[Piece]:
        """Yield each piece."""
        for document, start, length in zip(self.documents, self.starts, self.lengths, strict=True):
            yield document, start, start + length

    def __eq__(self, other: object) -> bool:
        """Whether both have the same pieces."""
        return isinstance(other, Row) and list(self) == list(other)

    __hash__ = None  # pyright: ignore[reportAssignmentType], columns may change

    def __repr__(self) -> str:
        """As it is made."""
        return f"Row.of({list(self)})"
