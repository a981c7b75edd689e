"""Items that a source yields: documents, and skipped records with the reason."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from data_pipeline.stores.urls import Location
from longctx.chat.conversation import FIELDS, Conversation
from longctx.chat.preference import PREFERENCE_FIELDS, Preference

PAIRS = "pairs"
"""Record type with a source and a target."""
IMAGES = "images"
"""Record type with an image, and a label if there is one."""


class FileContentError(Exception):
    """Error from a reader that cannot continue in its file; items yielded before it are valid."""


@dataclass(frozen=True, slots=True)
class RawImage:
    """An image as its source has it."""

    content: bytes | np.ndarray
    """Bytes of an image file, or pixels, uint8 [H, W, C]."""
    label: int | str | None
    """Class index or name; None if the source has none."""


@dataclass(frozen=True, slots=True)
class Document:
    """One text with its name: a relative path, with ``:line`` in JSON Lines and ``:row`` in arrays and tables."""

    name: str
    text: str
    """For a conversation its messages' text (``conversation_text``), for a pair both sides, for a preference its prompt
    and replies; used to find duplicates and to check lengths."""
    conversation: Conversation | None = None
    """Messages, if the record is a conversation."""
    pair: tuple[str, str] | None = None
    """Source and target, if the record is a pair."""
    preference: Preference | None = None
    """Prompt and replies, if the record is a preference."""
    image: RawImage | None = None
    """Image, if the record is one; ``text`` is then empty."""


@dataclass(frozen=True, slots=True)
class Fields:
    """Fields or columns that make up a document."""

    text: str = "text"
    """Field with the text, for pairs the target, for images the image."""
    kind: str = "text"
    """``text``, ``pairs``, ``images``, a conversation type (``messages``, ``conversations`` or ``prompt``), or a
    preference type (``preferences`` or ``labelled``)."""
    source: str = ""
    """Field with the source, for pairs."""
    label: str = ""
    """Field with the label, for images; empty: labels are not read, wherever they are."""

    @property
    def names(self) -> tuple[str, ...]:
        """Fields that a record needs."""
        if self.kind == PAIRS:
            return (self.source, self.text)
        if self.kind in PREFERENCE_FIELDS:
            return PREFERENCE_FIELDS[self.kind]
        return FIELDS.get(self.kind, (self.text,))

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint entry; for texts it equals that of releases without other record types."""
        if self.kind == IMAGES:
            return {"format": IMAGES, "image_field": self.text, "label_field": self.label}
        # Fingerprints must stay equal across releases, so only non-default values add keys.
        entry = {"text_field": self.text}
        if self.kind != "text":
            entry["format"] = self.kind
        if self.source:
            entry["source_field"] = self.source
        return entry


@dataclass(frozen=True, slots=True)
class Skip:
    """Folder (its name ends in ``/``), file, line or row that was left out."""

    name: str
    reason: str
    """A few words, such as ``empty`` or ``binary``; skips are counted by reason."""
    detail: str = ""
    """Details without absolute paths, so that the same corpus gives the same list everywhere."""
    is_fault: bool = False
    """True if the item is damaged or unusable; strict reading stops here."""


@dataclass(frozen=True, slots=True)
class Format:
    """Format in which a file is read."""

    kind: str
    """``text``, ``lines``, ``json``, ``csv``, ``tsv``, ``parquet``, ``arrow``; for pairs also ``parallel``, ``po``; for
    images ``image``, ``idx``, ``parquet``."""
    compression: str = ""
    """``.gz``, ``.bz2``, ``.xz``, ``.zst`` or empty."""
    ending: str = ""
    """File suffix that determined the format; empty for plain text."""
    is_explicit: bool = False
    """True if the user set the format explicitly."""


@dataclass(frozen=True, slots=True)
class File:
    """A file to read."""

    path: Location
    name: str
    r"""Path relative to the source, with ``/`` on every system; bytes that are not UTF-8 are written ``\xNN``."""
    size: int
    """Bytes on disk."""
    format: Format = field(default_factory=lambda: Format("text"))
    other: File | None = None
    """File with the other side if this file's lines are one side of pairs, or with the labels of its images."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Text files that become one document, in order."""

    name: str
    """Document name."""
    files: tuple[File, ...]
    header: str = ""
    """Template for a line above each file (``joining.Join``); empty: files follow each other directly."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """Unit of reading: a file, consecutive complete records in a large file, or several joined files."""

    file: File
    """The file, or the first one if several are joined."""
    start: int = 0
    """Start: byte offset in JSON Lines, row group in Parquet; 0 for all other files."""
    stop: int | None = None
    """End (exclusive); None for a file that is not split."""
    first: int = 0
    """Records in the file before this file piece."""
    size: int = 0
    """Approximate bytes on disk."""
    joined: Joined | None = None
    """Joined files, if there are several."""


def full_piece(file: File) -> FilePiece:
    """Return a file piece that covers a complete file."""
    return FilePiece(file, size=file.size)


Item = Document | Skip

Progress = Callable[[int, int], None]
"""Callback that receives the documents and text bytes processed so far."""


# Suffixes decide the format, so that a listing needs no reads.
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
"""Readable formats, for messages."""


def find_format(name: str, *, read_as: str = "") -> Format:
    """Return the format for a file name, or the one that ``read_as`` (``text`` or ``json``) sets.

    The name determines the compression in both cases.
    """
    lowered = name.lower()
    # Strip the compression's suffix first: the one before it decides the format.
    packed = next((ending for ending in _COMPRESSIONS if lowered.endswith(ending)), "")
    compression = _COMPRESSIONS.get(packed, "")
    if read_as:
        return Format(read_as, compression, packed, is_explicit=True)
    inner = next((ending for ending in _KINDS if lowered.removesuffix(packed).endswith(ending)), "")
    return Format(_KINDS.get(inner, "text"), compression, inner + packed)
