"""Reads a source's file pieces in order and leaves out documents that are too short or too long."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.prepare.left_out import LeftOut
from data_pipeline.prepare.readers.read_files import read_documents
from data_pipeline.prepare.source_items import Document, Fields, FilePiece, Skip
from longctx.errors import DataError

_MOST_BYTES_OF_A_CHARACTER = 4


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Bounds on document lengths. Documents outside them are left out completely and listed."""

    min_bytes: int = 0
    """Minimum UTF-8 bytes in a document's text."""
    max_bytes: int | None = None
    """Maximum; None: no limit."""

    def __post_init__(self) -> None:
        """Raise DataError if the bounds admit no document."""
        if self.min_bytes < 0:
            raise DataError(f"min_bytes={self.min_bytes} must be at least 0. Omit it for documents of any length.")
        if self.max_bytes is not None and self.max_bytes < max(1, self.min_bytes):
            raise DataError(
                f"max_bytes={self.max_bytes} must be at least 1 and not below min_bytes={self.min_bytes}. "
                "Leave one of them out."
            )

    def to_json(self) -> dict[str, int]:
        """Return the fingerprint entry; empty if any length is accepted, as in older releases."""
        bounds: dict[str, Any] = {}
        if self.min_bytes:
            bounds["min_bytes"] = self.min_bytes
        if self.max_bytes is not None:
            bounds["max_bytes"] = self.max_bytes
        return bounds

    def problem(self, document: Document) -> Skip | None:
        """Return a Skip if a document is too short or too long."""
        # Encode only if these bounds on the byte count do not decide.
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
    """Options for reading a source's files."""

    spec: str
    """The user's spelling of the source, for messages."""
    fields: Fields
    strict: bool
    """True if a fault stops reading with an error."""
    lengths: Lengths = ANY_LENGTH
    """Bounds on document lengths."""


class SourceReader:
    """One pass over file pieces."""

    def __init__(self, read_as: ReadAs, on_left_out: Callable[[Skip], None] | None = None) -> None:
        self._read_as = read_as
        self._on_left_out = on_left_out
        self.left_out = LeftOut()
        """Skips so far."""
        self.bytes_read = 0
        """Bytes on disk passed so far."""

    def documents(self, pieces: Iterable[FilePiece]) -> Iterator[Document]:
        """Yield every document. Unreadable items are recorded; in strict mode a fault raises ``DataError``."""
        passed = 0
        for piece in pieces:
            for item, bytes_read in read_documents(piece, self._read_as.fields):
                self.bytes_read = passed + bytes_read
                if isinstance(item, Document):
                    problem = self._read_as.lengths.problem(item)
                    if problem is None:
                        yield item
                    else:
                        self.note(problem)
                    continue
                self.leave_out(item)
            # Readers may stop before the end of a damaged file, so advance by the full size.
            passed += piece.size
            self.bytes_read = passed

    def leave_out(self, skip: Skip) -> None:
        """Record an unusable item; in strict mode a fault raises ``DataError``."""
        if skip.is_fault and self._read_as.strict:
            raise DataError(strict_read_error(self._read_as.spec, skip))
        self.note(skip)

    def note(self, skip: Skip) -> None:
        """Count a skip, log it, and pass it on."""
        logger.info("left out %s: %s %s", skip.name, skip.reason, skip.detail)
        self.left_out.add(skip)
        if self._on_left_out is not None:
            self._on_left_out(skip)


def strict_read_error(spec: str, skip: Skip) -> str:
    """Return the error message for a strict read's first fault."""
    return (
        f"{spec}: {skip.name}: {skip.reason} ({skip.detail or 'strict reading'}).\n"
        f"Repair it, leave it out with --exclude, or read without --strict, which leaves it out and lists it."
    )
