"""JSON Lines, and ``.json`` files with an array of objects, consecutive objects, or lines; in bounded memory."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from data_pipeline.prepare.readers.open_file import OpenFile
from data_pipeline.prepare.readers.records import MOST_VALUES, Record, check_length, check_values, items_of
from data_pipeline.prepare.source_items import Fields, FileContentError, Item, Skip

_PIECE_BYTES = 1 << 20


def read_lines(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one document per line."""
    yield from items_of(records_in_lines(source), fields)


def records_in_lines(source: OpenFile, prefix: bytes = b"") -> Iterator[Record | Skip]:
    """Yield each line's value, or a Skip with the reason; blank lines are ignored.

    ``prefix`` holds bytes already read from the stream.
    """
    for number, line in enumerate(_lines(source.stream, prefix), start=source.piece.first + 1):
        if line.strip():
            yield _record(line, f"{source.name}:{number}")


def _lines(stream: BinaryIO, prefix: bytes) -> Iterator[bytes]:
    r"""Yield lines without their newline; only ``\n`` ends a line, as JSON Lines requires."""
    # Iterating over the stream would also end lines at \r and at Unicode line separators. Collect a long line's buffers
    # and join them once, to avoid quadratic copying.
    unfinished: list[bytes] = []
    length = 0
    piece = prefix or stream.read(_PIECE_BYTES)
    while piece:
        head, *lines = piece.split(b"\n")
        unfinished.append(head)
        length += len(head)
        check_length(length)
        if lines:
            yield b"".join(unfinished)
            rest = lines.pop()
            yield from lines
            unfinished, length = [rest], len(rest)
        piece = stream.read(_PIECE_BYTES)
    if length:
        yield b"".join(unfinished)


def _record(line: bytes, name: str) -> Record | Skip:
    """Parse one line."""
    # utf-8-sig: the first line may start with a byte-order mark.
    try:
        text = line.decode("utf-8-sig")
        check_values(text)
        value = json.loads(text)
    except UnicodeDecodeError as error:
        return Skip(name, "not UTF-8", str(error), is_fault=True)
    except (ValueError, RecursionError, FileContentError) as error:
        return Skip(name, "not JSON", str(error), is_fault=True)
    return Record(name, value)


_DECODER = json.JSONDecoder()
_BYTE_ORDER_MARK = codecs.BOM_UTF8
_SPACE = re.compile(r"[ \t\r\n]*")
# A literal, number or escape that the end of the buffer cuts is shorter than this.
_LONGEST_SCALAR_ERROR = 16


def read_json_records(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one document per array element, value or line."""
    yield from items_of(records_in_json(source), fields)


def records_in_json(source: OpenFile) -> Iterator[Record | Skip]:
    """Yield each array element, value or line, depending on how the file starts."""
    prefix, is_lines = _begin(source.stream)
    if is_lines:
        yield from records_in_lines(source, prefix)
        return
    for number, value in enumerate(_values(_Buffer(source.stream, prefix))):
        yield Record(f"{source.name}:{number}", value)


def _begin(stream: BinaryIO) -> tuple[bytes, bool]:
    """Return the start of the file, and whether it is JSON Lines."""
    prefix = stream.read(_PIECE_BYTES)
    while True:
        content = prefix.removeprefix(_BYTE_ORDER_MARK).lstrip()
        # An array may be the entire file on one line, so do not wait for a line end.
        if content[:1] == b"[":
            return prefix, False
        line, newline, _ = content.partition(b"\n")
        # Read more only while the first line has not ended, doubling each time.
        piece = b""
        if not newline:
            check_length(len(prefix))
            try:
                piece = stream.read(max(_PIECE_BYTES, len(prefix)))
            except FileContentError:
                # The next read raises it again: the line may contain complete values before the damage.
                return prefix, False
        if not piece:
            # An object that spans lines starts with "{" or with fields that end in a comma.
            return prefix, line.rstrip().endswith(b"}")
        prefix += piece


def _values(buffer: _Buffer) -> Iterator[Any]:
    """Yield the array's elements, or the consecutive values."""
    if buffer.next_character() != "[":
        while buffer.next_character():
            yield buffer.take_value()
        return
    buffer.skip_character()
    separator = ","
    if buffer.next_character() == "]":
        separator = "]"
        buffer.skip_character()
    while separator == ",":
        yield buffer.take_value()
        separator = buffer.next_character()
        buffer.skip_character()
    if not separator:
        raise FileContentError("the array has no end")
    if separator != "]":
        raise FileContentError(f"{separator!r} stands behind an element of the array")
    if buffer.next_character():
        raise FileContentError("there is more behind the array")


class _Buffer:
    """Window over the text being parsed. Bytes that are not UTF-8 become lone surrogates."""

    def __init__(self, stream: BinaryIO, prefix: bytes) -> None:
        self._stream = stream
        self._decoder = codecs.getincrementaldecoder("utf-8-sig")("surrogateescape")
        self._text = self._decoder.decode(prefix)
        self._at = 0

    def next_character(self) -> str:
        """Return the next non-space character without consuming it; empty at the end."""
        while True:
            spaces = _SPACE.match(self._text, self._at)
            assert spaces is not None
            self._at = spaces.end()
            if self._at < len(self._text) or not self._fill():
                return self._text[self._at : self._at + 1]

    def skip_character(self) -> None:
        """Consume one character."""
        self._at += 1

    def take_value(self) -> Any:
        """Consume and return the next value; raise FileContentError if it is not JSON."""
        self.next_character()
        while True:
            try:
                value, end = _DECODER.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._may_be_cut(error) and self._fill():
                    continue
                raise FileContentError(f"not JSON ({error.msg})") from error
            except (ValueError, RecursionError) as error:
                raise FileContentError(f"not JSON ({error})") from error
            # A number that ends with the buffer may continue after it; any other value is complete.
            if isinstance(value, int | float) and end == len(self._text) and self._fill():
                continue
            self._at = end
            return value

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        """Return whether the error may come from the end of the buffer and not from the text."""
        return error.msg.startswith("Unterminated string") or error.pos >= len(self._text) - _LONGEST_SCALAR_ERROR

    def _fill(self) -> bool:
        """Read more text; return False at the end of the file."""
        rest = self._text[self._at :]
        check_length(len(rest))
        check_values(rest)
        pieces, values, left = [rest], 0, max(_PIECE_BYTES, len(rest))
        # Double the text, so that a long value is parsed again only a few times, but stop at too many values.
        while left > 0 and values < MOST_VALUES:
            try:
                piece = self._stream.read(_PIECE_BYTES)
            except FileContentError:
                # The next read raises it again: return the text before the damage first.
                if len(pieces) > 1:
                    break
                raise
            pieces.append(self._decoder.decode(piece, final=not piece))
            left -= len(piece)
            values += pieces[-1].count(",")
            if not piece:
                break
        self._text, self._at = "".join(pieces), 0
        return len(self._text) > len(rest)
