"""An open file as its readers see it: decompressed bytes, and how far the reading has come."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO, cast

import zstandard

from data_pipeline.prepare.documents import File, Piece
from longctx.errors import DataError

_ZSTD_INPUT_BYTES = 2 << 10
"""Read at a time: they can become 64 MiB, which are in memory at once. Smaller pieces take longer."""


class OpenFile:
    """One file, or a piece of it, under a reader."""

    def __init__(self, piece: Piece, raw: BinaryIO, stream: BinaryIO) -> None:
        self.piece = piece
        self.raw = raw
        """The bytes on disk."""
        self.stream = stream
        """The decompressed bytes: ``raw`` itself where nothing is compressed."""
        self.share: float | None = None
        """Part of the file that was read, set by readers that do not go through it from front to end."""

    @property
    def file(self) -> File:
        """The file that is read."""
        return self.piece.file

    @property
    def name(self) -> str:
        """The file's name in its source."""
        return self.file.name

    @property
    def bytes_read(self) -> int:
        """Bytes on disk that were read of the piece so far."""
        if self.share is not None:
            return int(self.share * self.piece.size)
        return min(self.raw.tell() - self.piece.start, self.piece.size)


@contextmanager
def opened(piece: Piece) -> Iterator[OpenFile]:
    """Open a file for reading; OSError where the system refuses, DataError where it is not what was listed."""
    file = piece.file
    # By Python and not by Arrow, which takes no path that is not UTF-8.
    with file.path.open("rb") as raw:
        size = raw.seek(0, os.SEEK_END)
        raw.seek(0)
        # Half of an old file and half of a new one would be neither.
        if size != file.size:
            raise DataError(
                f"{file.path} has changed since it was listed: it had {file.size:,} bytes and has {size:,}.\n"
                "Start again when nobody writes to it any more."
            )
        if file.format.compression:
            with _decompressed(raw, file.format.compression) as stream:
                yield OpenFile(piece, raw, stream)
        elif piece.stop is not None and file.format.kind == "lines":
            raw.seek(piece.start)
            yield OpenFile(piece, raw, cast(BinaryIO, _Range(raw, piece.stop - piece.start)))
        else:
            yield OpenFile(piece, raw, raw)


def _decompressed(raw: BinaryIO, compression: str) -> BinaryIO:
    """A stream of the decompressed bytes; reading it raises for a file that was cut off."""
    if compression == ".gz":
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw))
    if compression == ".bz2":
        return cast(BinaryIO, bz2.BZ2File(raw))
    if compression == ".xz":
        return cast(BinaryIO, lzma.LZMAFile(raw))
    return io.BufferedReader(_ZstdStream(raw), buffer_size=1 << 20)


class _Range:
    """The next bytes of a file, as if it ended there."""

    def __init__(self, raw: BinaryIO, count: int) -> None:
        self._raw = raw
        self._left = count

    def read(self, count: int) -> bytes:
        """Up to ``count`` bytes; none at the end."""
        piece = self._raw.read(min(count, self._left))
        self._left -= len(piece)
        return piece


class _ZstdStream(io.RawIOBase):
    """Frames of zstd one after the other, of any window; EOFError for a file that was cut off.

    zstandard's own stream ends such a file in silence, and Arrow's refuses windows above 128 MiB (``zstd --long=31``).
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
        self._frame = self._decompressor.decompressobj()
        self._is_inside = False
        self._input = b""
        self._output = memoryview(b"")

    def readable(self) -> bool:
        """True: it can be read."""
        return True

    def readinto(self, buffer) -> int:
        """Fill ``buffer`` as far as the next bytes go, and return their number; 0 at the end."""
        while not self._output:
            piece = self._input or self._raw.read(_ZSTD_INPUT_BYTES)
            if not piece:
                if self._is_inside:
                    raise EOFError("it ends in the middle of a zstd frame")
                return 0
            self._output = memoryview(self._frame.decompress(piece))
            self._input, self._is_inside = b"", True
            if self._frame.eof:
                self._input, self._is_inside = self._frame.unused_data, False
                self._frame = self._decompressor.decompressobj()
        count = min(len(buffer), len(self._output))
        buffer[:count] = self._output[:count]
        self._output = self._output[count:]
        return count
