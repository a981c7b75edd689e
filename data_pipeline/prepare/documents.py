"""Items that a source yields: documents, and skipped records with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from data_pipeline.stores.urls import Location
from longctx.chat.conversation import FIELDS, Conversation

PAIRS = "pairs"
"""The kind of records with a source and a target."""


class DamageError(Exception):
    """Error of a reader that cannot continue in its file; items yielded before it are valid."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text and its name: a relative path, with ``:line`` in JSON Lines and ``:row`` in arrays and tables."""

    name: str
    text: str
    """Of a conversation what is said in it (``spoken``), of a pair both sides: by it duplicates are found and lengths
    are counted."""
    conversation: Conversation | None = None
    """The messages, if the record is a conversation."""
    pair: tuple[str, str] | None = None
    """Source and target, if the record is a pair."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields or columns that make up a document."""

    text: str = "text"
    """The field with the text; of pairs with the target."""
    kind: str = "text"
    """``text``, ``pairs``, or a kind of conversation: ``messages``, ``conversations`` or ``prompt``."""
    source: str = ""
    """The field with the source, of pairs."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields that a record needs."""
        if self.kind == PAIRS:
            return (self.source, self.text)
        return FIELDS.get(self.kind, (self.text,))

    def to_json(self) -> dict[str, Any]:
        """Return the entry of a fingerprint; for texts it is unchanged since before other kinds existed."""
        said = {"text_field": self.text}
        if self.kind != "text":
            said["format"] = self.kind
        if self.source:
            said["source_field"] = self.source
        return said


@dataclass(frozen=True, slots=True)
class Skip:
    """A folder (its name ends in ``/``), file, line or row that was left out."""

    name: str
    reason: str
    """A few words, such as ``empty`` or ``binary``: skips are counted by them."""
    detail: str = ""
    """What was found; without absolute paths, so that the same corpus gives the same list everywhere."""
    is_fault: bool = False
    """Whether something is wrong with it: a strict reading ends here."""


@dataclass(frozen=True, slots=True)
class Format:
    """Format in which a file is read."""

    kind: str
    """``text``, ``lines``, ``json``, ``csv``, ``tsv``, ``parquet`` or ``arrow``; of pairs also ``parallel`` or
    ``po``.
    """
    compression: str = ""
    """``.gz``, ``.bz2``, ``.xz``, ``.zst`` or nothing."""
    ending: str = ""
    """The ending of the name that says so; empty for plain text."""
    is_meant: bool = False
    """Whether the user said so, whatever the file looks like."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to read."""

    path: Location
    name: str
    """Path relative to the source, with ``/`` on every system; bytes that are not UTF-8 are spelt ``\\xNN``."""
    size: int
    """Bytes on disk."""
    format: Format = field(default_factory=lambda: Format("text"))
    other: File | None = None
    """Of lines that are one side of pairs the file with the other."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Text files that become one document, in order."""

    name: str
    """The document's name."""
    files: tuple[File, ...]
    header: str = ""
    """Template of a line above each file (``joining.Join``); empty: files follow each other directly."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Unit of reading: a file, a run of complete records of a large file, or several joined files."""

    file: File
    """The first one, where files are joined."""
    start: int = 0
    """Where it begins: a byte of JSON Lines, a row group of Parquet; 0 in all other files."""
    stop: int | None = None
    """Where it ends; None for a file that is not cut."""
    first: int = 0
    """Records of the file before it."""
    size: int = 0
    """About how many of the file's bytes on disk it is."""
    joined: Joined | None = None
    """The files, where it is several."""


def whole(file: File) -> Piece:
    """Return the file as one piece."""
    return Piece(file, size=file.size)


Item = Document | Skip

Progress = Callable[[int, int], None]
"""A function that takes the number of documents and of bytes of text done so far."""


_KINDS = {
    ".jsonl": "lines",
    ".jsonlines": "lines",
    ".ndjson": "lines",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
}
_COMPRESSIONS = {
    ".gz": ".gz",
    ".gzip": ".gz",
    ".bz2": ".bz2",
    ".xz": ".xz",
    ".lzma": ".xz",
    ".zst": ".zst",
    ".zstd": ".zst",
}
READABLE = f"text, {', '.join(_KINDS)}, each also {', '.join(_COMPRESSIONS)}"
"""What a source may hold, for messages."""


def find_format(name: str, *, read_as: str = "") -> Format:
    """Return the format of a file of this name, or the one that ``read_as`` sets, ``text`` or ``json``.

    In either case the name determines the compression.
    """
    lowered = name.lower()
    packed = next((ending for ending in _COMPRESSIONS if lowered.endswith(ending)), "")
    compression = _COMPRESSIONS.get(packed, "")
    if read_as:
        return Format(read_as, compression, packed, is_meant=True)
    inner = next((ending for ending in _KINDS if lowered.removesuffix(packed).endswith(ending)), "")
    return Format(_KINDS.get(inner, "text"), compression, inner + packed)
