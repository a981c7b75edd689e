"""Read pieces of a source one after the other, and leave out the documents that are too short or too long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.prepare.documents import Document, Fields, Piece, Skip
from data_pipeline.prepare.left_out import LeftOut
from data_pipeline.prepare.readers.read import read
from longctx.errors import DataError

_MOST_BYTES_OF_A_CHARACTER = 4


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """The lengths that are wanted. Documents of other lengths are left out and listed, whole."""

    min_bytes: int = 0
    """UTF-8 bytes of a document's text, at least."""
    max_bytes: int | None = None
    """At most; None for any."""

    def __post_init__(self) -> None:
        """DataError for bounds that leave nothing."""
        if self.min_bytes < 0:
            raise DataError(f"min_bytes={self.min_bytes} must be at least 0. Leave it out for documents of any length.")
        if self.max_bytes is not None and self.max_bytes < max(1, self.min_bytes):
            raise DataError(
                f"max_bytes={self.max_bytes} must be at least 1 and not below min_bytes={self.min_bytes}. "
                "Leave one of them out."
            )

    def to_json(self) -> dict[str, int]:
        """What a fingerprint says of it: nothing where any length is taken, as ever."""
        bounds: dict[str, Any] = {}
        if self.min_bytes:
            bounds["min_bytes"] = self.min_bytes
        if self.max_bytes is not None:
            bounds["max_bytes"] = self.max_bytes
        return bounds

    def problem(self, document: Document) -> Skip | None:
        """Why a document is left out; None if it is used."""
        # Between these two bounds alone the bytes have to be counted.
        least, most = len(document.text), _MOST_BYTES_OF_A_CHARACTER * len(document.text)
        if self.min_bytes <= least and (self.max_bytes is None or most <= self.max_bytes):
            return None
        size = len(document.text.encode())
        if size < self.min_bytes:
            return Skip(document.name, "too short", f"{size:,} bytes")
        if self.max_bytes is not None and size > self.max_bytes:
            return Skip(document.name, "too long", f"{size:,} bytes")
        return None


ANY_LENGTH = Lengths()


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
