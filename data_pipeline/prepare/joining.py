"""Joining a directory's files into one long document: file selection, names, and cuts if it would be too long.

A pure function of the listing, so documents are the same on every machine.
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from data_pipeline.prepare.source_items import File, FilePiece, Joined
from longctx.errors import DataError

DEFAULT_JOIN_BYTES = 1 << 25
"""File bytes per document: about ten million tokens of code."""

_FIELDS = ("path", "directory", "name")
_TRY = r"Try --join-header '# {path}\n'."


@dataclass(frozen=True, kw_only=True)
class Join:
    """Rule for joining text files into documents by directory."""

    depth: int = 0
    """Directory levels below the source that separate documents: 1 joins everything below each top-level directory. 0:
    each directory separately, with the files directly in it."""
    most_bytes: int = DEFAULT_JOIN_BYTES
    """Maximum file bytes per document, unless a single file has more."""
    header: str = ""
    """Template for a line above each file, with the file's ``{path}``, ``{directory}`` and ``{name}``."""

    def __post_init__(self) -> None:
        """Raise DataError for invalid values."""
        if self.depth < 0:
            raise DataError(f"join_depth={self.depth} must be at least 0. Omit it to join each directory separately.")
        if self.most_bytes < 1:
            raise DataError(f"join_bytes={self.most_bytes} must be at least 1. Try {DEFAULT_JOIN_BYTES}.")
        if self.header:
            _check_header(self.header)

    def to_json(self) -> dict[str, Any]:
        """Return the fingerprint entry: other values give other documents."""
        return {"by": "directory", "depth": self.depth, "bytes": self.most_bytes, "header": self.header}

    def directory_of(self, name: str) -> str:
        """Return the directory whose document contains the file at this relative path, with a trailing ``/``."""
        folders = name.split("/")[:-1]
        if self.depth:
            folders = folders[: self.depth]
        return "/".join(folders) + "/" if folders else "./"


def join_pieces(pieces: Iterable[FilePiece], join: Join) -> Iterator[FilePiece]:
    """Yield the file pieces with text files joined by directory at the position of each directory's first file.

    Other pieces stay as they are. A directory with more than ``join.most_bytes`` is cut between files, and its
    documents are named after their first files.
    """
    found: dict[str, list[File]] = {}
    # A string is a directory's placeholder: its document is complete only after the last file piece.
    order: list[FilePiece | str] = []
    for piece in pieces:
        # Table rows are separate texts, so tables are never joined.
        if piece.file.format.kind != "text":
            order.append(piece)
            continue
        directory = join.directory_of(piece.file.name)
        if directory not in found:
            found[directory] = []
            order.append(directory)
        found[directory].append(piece.file)
    for entry in order:
        if isinstance(entry, FilePiece):
            yield entry
        else:
            yield from _documents(entry, found[entry], join)


def begin_of(joined: Joined, file: File, before: str) -> str:
    """Return the text inserted before a file in its document; ``before`` is the previous file's text."""
    if not joined.header:
        return ""
    directory, _, name = file.name.rpartition("/")
    header = joined.header.format(path=file.name, directory=directory, name=name)
    # A header starts on a new line.
    if before and not before.endswith("\n"):
        header = "\n" + header
    return header


def cut_directories(pieces: Iterable[FilePiece], join: Join) -> dict[str, int]:
    """Count the documents per directory, for directories too large for a single document."""
    counts: dict[str, int] = {}
    for piece in pieces:
        if piece.joined is not None:
            directory = join.directory_of(piece.file.name)
            counts[directory] = counts.get(directory, 0) + 1
    return {directory: count for directory, count in counts.items() if count > 1}


def _documents(directory: str, files: list[File], join: Join) -> Iterator[FilePiece]:
    # Cut by size on disk, which is known before anything is read: cuts must not depend on the reader.
    groups: list[list[File]] = [[]]
    size = 0
    for file in files:
        if groups[-1] and size + file.size > join.most_bytes:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    for part in groups:
        name = directory
        if len(groups) > 1:
            name = f"{directory}:{part[0].name.removeprefix(directory)}"
        joined = Joined(name, tuple(part), join.header)
        yield FilePiece(part[0], size=sum(file.size for file in part), joined=joined)


def _check_header(header: str) -> None:
    """Raise DataError if a template is malformed, has an unknown field, or does not identify the file."""
    try:
        fields = [(field, spec, how) for _, field, spec, how in string.Formatter().parse(header) if field is not None]
    except ValueError as error:
        raise DataError(
            f"join_header={header!r} is not a valid template ({error}). Double literal braces. {_TRY}"
        ) from (error)
    for field, spec, how in fields:
        if field not in _FIELDS or spec or how:
            raise DataError(
                f"join_header={header!r} has an invalid field {{{field}}}. Use "
                f"{', '.join('{' + known + '}' for known in _FIELDS)}; double literal braces. {_TRY}"
            )
    if not {"path", "name"} & {field for field, _, _ in fields}:
        raise DataError(f"join_header={header!r} does not identify the file: it needs {{path}} or {{name}}. {_TRY}")
