"""A compressed file as one stream of bytes: all its frames one after the other, and every byte before damage.

Python's own streams end in silence behind the first stream of an ``.xz`` or ``.bz2`` that padding or anything else
follows; and if they meet damage, what they had decompressed since the last call is lost. zstandard's ends a file that
was cut in silence, and Arrow's refuses zstd windows above 128 MiB (``zstd --long=31``). So here frames are taken one by
one for all four: a frame is a gzip member, a bzip2 or xz stream or a zstd frame, skippable ones too.
"""

from __future__ import annotations

import bz2
import io
import lzma
import sys
import zlib
from typing import BinaryIO, Protocol

import zstandard

from data_pipeline.prepare.documents import DamageError
from data_pipeline.prepare.readers.records import allowance, check_expansion

_INPUT_BYTES = 2 << 10
"""Read at a time: of zstd they can become 64 MiB, which are in memory at once. Smaller pieces take longer."""
_TEXT_BYTES = 1 << 16
"""Given to a reader that does not say how much it wants."""
_PADDING = {".gz": 1, ".bz2": 1, ".xz": 4, ".zst": 0}
"""Zero bytes that may stand behind a frame come in multiples of this; 0: there may be none. Tapes and ``xz`` pad so."""
_OUTPUT_BYTES = 1 << 22
"""Taken at a time of a bzip2 or xz frame: of bzip2 those 2 KiB can become gigabytes."""
_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError, zstandard.ZstdError)
"""Of a frame that cannot go on."""


class _Frame(Protocol):
    """One frame under way."""

    @property
    def eof(self) -> bool:
        """Whether it has come to its end."""
        ...

    @property
    def unused_data(self) -> bytes:
        """What was given to it beyond its end."""
        ...

    def decompress(self, data: bytes, /) -> bytes:
        """All that can be decompressed by now."""
        ...


class Decompressed(io.BufferedIOBase):
    """The decompressed bytes of a file. Reading raises DamageError once all that stands before the damage was read."""

    def __init__(self, raw: BinaryIO, compression: str) -> None:
        """``raw`` is at its beginning."""
        self._raw, self._compression = raw, compression
        self._input = b""
        self._output = memoryview(b"")
        self._damage: DamageError | None = None
        self._frame: _Frame | None = None
        # Bytes on disk: of what was decompressed, and before the frame under way.
        self._at = self._frame_at = 0
        self._frames = self._padding = 0
        # Bytes that the frame under way has given, and all frames.
        self._given = self._total = 0
        # Whether the frame has more to give before it needs input.
        self._is_full = False

    def readable(self) -> bool:
        """True: it can be read."""
        return True

    def read(self, size: int | None = -1, /) -> bytes:
        """Return the next bytes; fewer than asked for before the end or damage, which the next call then raises."""
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
        if self._damage is not None and not found and left:
            raise self._damage
        return b"".join(found)

    def read1(self, size: int = -1, /) -> bytes:
        """Return the next bytes, at most so many, as readers of text ask for them."""
        if size < 0:
            size = _TEXT_BYTES
        return self.read(size)

    def head(self, count: int) -> bytes:
        """Return the next bytes and leave them to be read."""
        found = b""
        if self._output or self._fill():
            found = self.read(count)
            self._output = memoryview(found + self._output)
        return found

    def _fill(self) -> bool:
        """Decompress more; False at the end, and where damage is all that follows."""
        if self._damage is None:
            try:
                self._output = memoryview(self._next())
            except DamageError as damage:
                self._damage = damage
                self._output = memoryview(self._before_damage())
        return bool(self._output)

    def _next(self) -> bytes:
        """Return what the next pieces of the file give; nothing at its end."""
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
        """Begin the next frame, unless there is more padding."""
        rest = self._input
        # Before the first frame it would be no padding.
        if self._frames and _PADDING[self._compression]:
            rest = rest.lstrip(b"\0")
        skipped = len(self._input) - len(rest)
        self._at, self._padding, self._input = self._at + skipped, self._padding + skipped, rest
        if rest:
            self._check_padding()
            self._frame = _new_frame(self._compression, is_first=not self._frames)
            self._frame_at, self._padding, self._given = self._at, 0, 0

    def _decompress(self, frame: _Frame) -> bytes:
        """Return what the frame makes of the input; DamageError where that is none of it."""
        try:
            output, self._is_full = _some(frame, self._input)
        except _ERRORS as error:
            where = "it cannot be decompressed"
            if self._frames:
                where = f"what follows its first {self._frame_at:,} bytes cannot be decompressed"
            raise DamageError(f"{where} ({error})") from error
        self._at += len(self._input)
        self._given, self._total = self._given + len(output), self._total + len(output)
        self._input = b""
        if frame.eof:
            self._input = frame.unused_data
            self._at -= len(self._input)
            self._frames += 1
            self._frame = None
        if self._total > allowance(self._at):
            # What it has given is all that is used of it.
            self._frame = None
            check_expansion(self._total, self._at)
        return output

    def _before_damage(self) -> bytes:
        """Return what the frame under way gives beyond what it has given, up to the byte where it fails."""
        if self._frame is None:
            return b""
        # A call that fails keeps what it has decompressed: the frame is begun anew, and fails at a byte of its own.
        frame, output, position = _new_frame(self._compression, is_first=not self._frames), [], self._raw.tell()
        self._raw.seek(self._frame_at)
        fine, left, is_full = self._at - self._frame_at, self._given, False
        spare = allowance(self._at) - self._total
        while spare >= 0:
            piece = b""
            if not is_full and not (piece := self._raw.read(min(_INPUT_BYTES, max(fine, 1)))):
                break
            try:
                given, is_full = _some(frame, piece)
            except _ERRORS:
                break
            output.append(given[left:])
            spare -= len(output[-1])
            fine, left = fine - len(piece), max(0, left - len(given))
        self._raw.seek(position)
        return b"".join(output)

    def _check_end(self) -> None:
        """Raise DamageError if the file must not end here."""
        if self._frame is not None:
            raise DamageError("it ends before its compressed data does")
        self._check_padding()

    def _check_padding(self) -> None:
        """Raise DamageError for padding that is not as long as any may be."""
        if self._padding and self._padding % _PADDING[self._compression]:
            raise DamageError(f"its {self._padding} zero bytes of padding are no multiple of 4")


def _new_frame(compression: str, *, is_first: bool) -> _Frame:
    """Return a frame at its beginning."""
    if compression == ".gz":
        return zlib.decompressobj(16 + zlib.MAX_WBITS)
    if compression == ".bz2":
        return bz2.BZ2Decompressor()
    if compression == ".xz":
        # The older .lzma has one stream and no sign to know it by: anything might pass for another one.
        return lzma.LZMADecompressor(lzma.FORMAT_AUTO if is_first else lzma.FORMAT_XZ)
    return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()


def _some(frame: _Frame, data: bytes) -> tuple[bytes, bool]:
    """Return what a frame makes of more input, and whether there is more to come of it without any."""
    if not isinstance(frame, bz2.BZ2Decompressor | lzma.LZMADecompressor):
        return frame.decompress(data), False
    output = frame.decompress(data, _OUTPUT_BYTES)
    # bzip2 asks for input as soon as it has none, and may hold megabytes.
    return output, not frame.eof and (len(output) == _OUTPUT_BYTES or not frame.needs_input)
