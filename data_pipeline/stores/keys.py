"""What names an object: the word that both sides of the door share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ObjectKey:
    """A folder or an object of a store, as a name alone."""

    scheme: str
    bucket: str
    key: str
    """Names with ``/`` between them, and none at the ends; empty for the whole bucket."""

    def __str__(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.key}".rstrip("/")
