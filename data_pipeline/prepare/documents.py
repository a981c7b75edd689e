"""Document."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its name: a relative path, with ``:line`` in JSON Lines and ``:row`` in Parquet."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Skip:
    name: str
    reason: str


@dataclass(frozen=True, slots=True)
class File:
    path: Path
    name: str
    size: int


Item = Document | Skip
