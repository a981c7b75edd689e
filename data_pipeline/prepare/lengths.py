"""Which documents are too short or too long to be used, by the bytes of their text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from data_pipeline.prepare.documents import Document, Skip
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
