"""Read pieces of a source one after the other: the same loop for a whole source and for a part of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from data_pipeline.prepare.documents import Document, Fields, Piece, Skip
from data_pipeline.prepare.left_out import LeftOut
from data_pipeline.prepare.lengths import ANY_LENGTH, Lengths
from data_pipeline.prepare.readers.read import read
from longctx.errors import DataError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ReadAs:
    """How a source's files are read."""

    spec: str
    """What the user named, for messages."""
    fields: Fields
    strict: bool
    """Whether a fault ends the reading."""
    lengths: Lengths = ANY_LENGTH
    """Which documents are used."""


class Reading:
    """One pass over pieces."""

    def __init__(self, read_as: ReadAs, on_left_out: Callable[[Skip], None] | None = None) -> None:
        self._read_as = read_as
        self._on_left_out = on_left_out
        self.left_out = LeftOut()
        """What was left out so far."""
        self.bytes_read = 0
        """Bytes on disk that the pass has gone by."""

    def documents(self, pieces: Iterable[Piece]) -> Iterator[Document]:
        """Yield every document. What cannot be read is noted; a fault is a ``DataError`` where reading is strict."""
        passed = 0
        for piece in pieces:
            for item, bytes_read in read(piece, self._read_as.fields):
                self.bytes_read = passed + bytes_read
                if isinstance(item, Document):
                    problem = self._read_as.lengths.problem(item)
                    if problem is None:
                        yield item
                    else:
                        self.note(problem)
                    continue
                if item.is_fault and self._read_as.strict:
                    raise DataError(fault(self._read_as.spec, item))
                self.note(item)
            # Readers may stop before the end of a damaged file.
            passed += piece.size
            self.bytes_read = passed

    def note(self, skip: Skip) -> None:
        """Count something that is left out, and pass it on."""
        logger.info("left out %s: %s %s", skip.name, skip.reason, skip.detail)
        self.left_out.add(skip)
        if self._on_left_out is not None:
            self._on_left_out(skip)


def fault(spec: str, skip: Skip) -> str:
    """The message of a strict reading about the first thing that is wrong."""
    return (
        f"{spec}: {skip.name}: {skip.reason} ({skip.detail or 'strict reading'}).\n"
        f"Mend it, leave it out with --exclude, or read without --strict: it is then left out and listed."
    )
