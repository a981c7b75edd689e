"""What a source yields: documents, and what it left out with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its name: a relative path, with ``:line`` in JSON Lines and ``:row`` in Parquet."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Skip:
    """A file, line or row that was left out."""

    name: str
    reason: str
    """A few words, such as ``empty`` or ``binary``: skips are counted by them."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to read."""

    path: Path
    name: str
    """Path relative to the source, with ``/`` on every system."""
    size: int
    """Bytes on disk."""


Item = Document | Skip

Progress = Callable[[int, int], None]
"""A function that takes the number of documents and of bytes of text done so far."""
