"""A compressed file as one byte stream: all its frames in order, and every byte before damage.

Python's own streams end silently after the first ``.xz`` or ``.bz2`` stream that is followed by padding or other bytes,
and at damage they lose the bytes decompressed since the last call. zstandard's stream ends a truncated file silently,
and Arrow's rejects zstd windows above 128 MiB (``zstd --long=31``). So this module decompresses frame by frame for all
four formats: a frame is a gzip member, a bzip2 or xz stream, or a zstd frame, including skippable ones.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from typing import BinaryIO, Protocol

import zstandard

from data_pipeline.prepare.readers.records import allowance, check_expansion
from data_pipeline.prepare.source_items import FileContentError

_INPUT_BYTES = 2 << 10
"""Bytes per read: as zstd they can become 64 MiB, all in memory at once. Smaller reads take longer."""
_TEXT_BYTES = 1 << 16
"""Bytes returned to a reader that does not request a size."""
_PADDING = {".gz": 1, ".bz2": 1, ".xz": 4, ".zst": 0}
"""Zero bytes after a frame come in multiples of this; 0: padding is not allowed. Tapes and ``xz`` pad in this way."""
_OUTPUT_BYTES = 1 << 22
"""Maximum bytes taken at once from a bzip2 or xz frame: 2 KiB in bzip2 can become gigabytes."""
_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""Errors from a frame that cannot continue."""


class _Frame(Protocol):
    """One frame being decompressed."""

    @property
    def eof(self) -> bool:
        """True if the frame has ended."""
        ...

    @property
    def unused_data(self) -> bytes:
        """Input bytes after the frame's end."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """Return all bytes that can be decompressed so far."""
        ...


class Decompressed(io.BufferedIOBase):
    """Decompressed bytes of a file. Reading raises FileContentError only after all bytes before the damage were
    returned.
    """

    def __init__(self, raw: BinaryIO, compression: str) -> None:
        """Initialize the stream; ``raw`` must be at its start."""
        self._raw, self._compression = raw, compression
        self._input = b""
        self._output = memoryview(b"")
        self._error: FileContentError | None = None
        self._frame: _Frame | None = None
        # Bytes on disk: consumed so far, and before the current frame.
        self._at = self._frame_at = 0
        self._frames = self._padding = 0
        # Bytes output by the current frame, and by all frames.
        self._given = self._total = 0
        # True if the frame has more output before it needs input.
        self._is_full = False

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes, fewer than ``size`` before the end or before damage, which the next call raises."""
        left = sys.maxsize
        if size is not None and size >= 0:
            left = size
        found: list[bytes] = []
        while left:
            if not self._output and not self._fill():
                break
            found.append(bytes(self._output[:left]))
            self._output = self._output[left:]
            left -= len(found[-1])
        if self._error is not None and not found and left:
            raise self._error
        return b"".join(found)

    def read1(self, size: int = -1, /) -> bytes:
        """Return up to ``size`` bytes, as text readers request them."""
        if size < 0:
            size = _TEXT_BYTES
        return self.read(size)

    def head(self, count: int) -> bytes:
        """Return the next bytes without consuming them."""
        found = b""
        if self._output or self._fill():
            found = self.read(count)
            self._output = memoryview(found + self._output)
        return found

    def _fill(self) -> bool:
        """Decompress more; return False at the end, or if only damage follows."""
        if self._error is None:
            try:
                self._output = memoryview(self._next())
            except FileContentError as damage:
                self._error = damage
                self._output = memoryview(self._read_until_error())
        return bool(self._output)

    def _next(self) -> bytes:
        """Return output from the next input buffers; empty at the end."""
        output = b""
        while not output:
            if not self._is_full:
                self._input = self._input or self._raw.read(_INPUT_BYTES)
                if not self._input:
                    self._check_end()
                    break
                if self._frame is None:
                    self._pass_padding()
            if self._frame is not None:
                output = self._decompress(self._frame)
        return output

    def _pass_padding(self) -> None:
        """Skip padding and start the next frame, if any."""
        rest = self._input
        # Zero bytes before the first frame are not padding.
        if self._frames and _PADDING[self._compression]:
            rest = rest.lstrip(b"\0")
        skipped = len(self._input) - len(rest)
        self._at, self._padding, self._input = self._at + skipped, self._padding + skipped, rest
        if rest:
            self._check_padding()
            self._frame = _new_frame(self._compression, is_first=not self._frames)
            self._frame_at, self._padding, self._given = self._at, 0, 0

    def _decompress(self, frame: _Frame) -> bytes:
        """Return the frame's output for the input; raise FileContentError if the input is invalid."""
        try:
            output, self._is_full = _some(frame, self._input)
        except _ERRORS as error:
            where = "it cannot be decompressed"
            if self._frames:
                where = f"what follows its first {self._frame_at:,} bytes cannot be decompressed"
            raise FileContentError(f"{where} ({error})") from error
        self._at += len(self._input)
        self._given, self._total = self._given + len(output), self._total + len(output)
        self._input = b""
        if frame.eof:
            self._input = frame.unused_data
            self._at -= len(self._input)
            self._frames += 1
            self._frame = None
        if self._total > allowance(self._at):
            # Keep the output so far, and ignore everything after it.
            self._frame = None
            check_expansion(self._total, self._at)
        return output

    def _read_until_error(self) -> bytes:
        """Return the rest of the current frame's output, up to the byte at which it fails."""
        if self._frame is None:
            return b""
        # A failing call discards its output, so decompress the frame again in single bytes near the end: it then fails
        # at an exact byte.
        frame, output, position = _new_frame(self._compression, is_first=not self._frames), [], self._raw.tell()
        self._raw.seek(self._frame_at)
        fine, left, is_full = self._at - self._frame_at, self._given, False
        budget = allowance(self._at) - self._total
        while budget >= 0:
            piece = b""
            if not is_full and not (piece := self._raw.read(min(_INPUT_BYTES, max(fine, 1)))):
                break
            try:
                given, is_full = _some(frame, piece)
            except _ERRORS:
                break
            output.append(given[left:])
            budget -= len(output[-1])
            fine, left = fine - len(piece), max(0, left - len(given))
        self._raw.seek(position)
        return b"".join(output)

    def _check_end(self) -> None:
        """Raise FileContentError if the file must not end here."""
        if self._frame is not None:
            raise FileContentError("it ends before its compressed data does")
        self._check_padding()

    def _check_padding(self) -> None:
        """Raise FileContentError if padding has an invalid length."""
        if self._padding and self._padding % _PADDING[self._compression]:
            raise FileContentError(f"its {self._padding} zero bytes of padding are no multiple of 4")


def _new_frame(compression: str, *, is_first: bool) -> _Frame:
    """Return a decompressor at the start of a frame."""
    if compression == ".gz":
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    if compression == ".bz2":
        return bz2.BZ2Decompressor()
    if compression == ".xz":
        # The older .lzma has one stream and no magic number: any bytes could be mistaken for another stream.
        return lzma.LZMADecompressor(lzma.FORMAT_AUTO if is_first else lzma.FORMAT_XZ)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _some(frame: _Frame, data: bytes) -> tuple[bytes, bool]:
    """Return a frame's output for more input, and whether it has more output without further input."""
    if not isinstance(frame, bz2.BZ2Decompressor | lzma.LZMADecompressor):
        return frame.decompress(data), False
    output = frame.decompress(data, _OUTPUT_BYTES)
    # bzip2 requests input as soon as it has consumed it, and may still hold megabytes of output.
    return output, not frame.eof and (len(output) == _OUTPUT_BYTES or not frame.needs_input)
