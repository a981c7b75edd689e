"""An open file for the readers: decompressed bytes, and progress."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

from data_pipeline.prepare.readers.decompressed import Decompressed
from data_pipeline.prepare.source_items import File, FilePiece
from longctx.errors import DataError

_HEAD_BYTES = 64
"""Enough to recognize a Git LFS pointer."""


class OpenFile:
    """A file, or one file piece, being read."""

    def __init__(self, piece: FilePiece, raw: BinaryIO, stream: BinaryIO) -> None:
        self.piece = piece
        self.raw = raw
        """Bytes on disk."""
        self.stream = stream
        """Decompressed bytes; ``raw`` itself without compression."""
        self.share: float | None = None
        """Fraction of the file read so far, set by readers that do not read sequentially."""

    @property
    def file(self) -> File:
        """File being read."""
        return self.piece.file

    @property
    def name(self) -> str:
        """The file's name in its source."""
        return self.file.name

    def head(self) -> bytes:
        """Return about the first 64 decompressed bytes without consuming them."""
        if isinstance(self.stream, Decompressed):
            return self.stream.head(_HEAD_BYTES) or self._raw_head()
        return self._raw_head()

    def _raw_head(self) -> bytes:
        """Return the first bytes on disk."""
        at = self.raw.tell()
        self.raw.seek(0)
        found = self.raw.read(_HEAD_BYTES)
        self.raw.seek(at)
        return found

    @property
    def bytes_read(self) -> int:
        """Bytes of this file piece read from disk so far."""
        if self.share is not None:
            return int(self.share * self.piece.size)
        return min(self.raw.tell() - self.piece.start, self.piece.size)


@contextmanager
def open_piece(piece: FilePiece) -> Iterator[OpenFile]:
    """Open a file for reading; raise OSError if the system refuses, DataError if it changed since it was listed."""
    file = piece.file
    # Open with Python and not with Arrow, which accepts only UTF-8 paths.
    with file.path.open("rb") as raw:
        size = raw.seek(0, os.SEEK_END)
        raw.seek(0)
        # Reading half an old file and half a new one would give a document that never existed.
        if size != file.size:
            raise DataError(
                f"{file.path} has changed since it was listed: it had {file.size:,} bytes and has {size:,}.\n"
                "Stop other writers, then start again."
            )
        if file.format.compression:
            yield OpenFile(piece, raw, cast(BinaryIO, Decompressed(raw, file.format.compression)))
        elif piece.stop is not None and file.format.kind == "lines":
            raw.seek(piece.start)
            yield OpenFile(piece, raw, cast(BinaryIO, _Range(raw, piece.stop - piece.start)))
        else:
            yield OpenFile(piece, raw, raw)


class _Range:
    """The next ``count`` bytes of a file, as if it ended after them."""

    def __init__(self, raw: BinaryIO, count: int) -> None:
        self._raw = raw
        self._left = count

    def read(self, count: int) -> bytes:
        """Return up to ``count`` bytes; empty at the end."""
        piece = self._raw.read(min(count, self._left))
        self._left -= len(piece)
        return piece
