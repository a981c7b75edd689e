"""Arrow IPC stream that checks messages before Arrow reads them.

A batch's buffers may be compressed. A compressed buffer's first 8 bytes state its decompressed size, and Arrow
allocates and fills that size for each buffer in the batch before any of it can be inspected. Buffer positions are in
the message header, a flatbuffer: tables that refer to their fields by offset (``Message``, ``RecordBatch`` and
``DictionaryBatch`` in Arrow's ``Message.fbs``). Headers that cannot be parsed here are invalid for Arrow too, which
verifies them first.
"""

from __future__ import annotations

import io
import struct
from typing import Any, BinaryIO

import pyarrow as pa

from data_pipeline.prepare.readers.records import FREE_BYTES, check_block

_CONTINUATION = b"\xff\xff\xff\xff"
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""Message types with a body that Arrow decodes."""
_OLD_COMPRESSION = b"ARROW:experimental_compression"
"""Marker that Arrow 0.17 used for compressed buffers."""


class BoundedMessages(io.RawIOBase):
    """Byte stream over checked messages.

    Reading raises FileContentError if a batch expands too much, and ArrowInvalid if a message is malformed.
    """

    def __init__(self, stream: BinaryIO, most_bytes: int) -> None:
        """Initialize; no body, nor all dictionaries together, may exceed ``most_bytes``, whatever the headers state."""
        super().__init__()
        self._stream, self._most_bytes = stream, most_bytes
        # Remaining buffers of the current message (length prefix, header, body).
        self._parts: list[bytes] = []
        # Totals over all dictionary batches, since each may extend the previous one.
        self._dictionary_bytes = self._dictionary_stated = 0
        self._is_over = False

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return the next ``size`` bytes, or fewer at the end."""
        found: list[bytes] = []
        while size > 0:
            if not self._parts and not self._is_over:
                self._parts = [part for part in self._message() if part]
            if not self._parts:
                found.append(self._stream.read(min(size, FREE_BYTES)))
                break
            part = self._parts.pop(0)
            if len(part) > size:
                self._parts.insert(0, part[size:])
            # Arrow requests exactly one of these buffers at a time, so bodies are not copied.
            found.append(part[:size])
            size -= len(found[-1])
        return found[0] if len(found) == 1 else b"".join(found)

    def _message(self) -> tuple[bytes, ...]:
        """Return the next message's length prefix, header and body; bytes after the last message are not checked."""
        begin = self._stream.read(4)
        if begin == _CONTINUATION:
            begin += self._stream.read(4)
        length = int.from_bytes(begin[-4:], "little", signed=True)
        if len(begin) not in (4, 8) or length <= 0:
            self._is_over = True
            return (begin,)
        if length > FREE_BYTES:
            raise pa.ArrowInvalid(f"a message has a head of {length:,} bytes")
        head = self._stream.read(length)
        if len(head) < length:
            self._is_over = True
            return begin, head
        try:
            num_bytes, buffers, is_dictionary = _bodies(head)
        except (struct.error, ValueError) as error:
            raise pa.ArrowInvalid("the head of a message cannot be read") from error
        # Read no more than the limit: the stated length is untrusted, and Arrow reports a short body itself.
        body = self._stream.read(min(num_bytes, self._most_bytes))
        self._is_over = len(body) < num_bytes
        stated = sum(_stated(body, *buffer) for buffer in buffers)
        check_block(stated, len(body))
        if is_dictionary:
            self._dictionary_bytes += len(body)
            self._dictionary_stated += stated
            check_block(self._dictionary_stated, self._dictionary_bytes)
            if self._dictionary_bytes > self._most_bytes:
                raise pa.ArrowInvalid(f"its dictionaries have more than {self._most_bytes:,} bytes")
        return begin, head, body


def _stated(body: bytes, offset: int, length: int) -> int:
    """Return the decompressed size that a compressed buffer states."""
    if length <= 0 or not 0 <= offset <= len(body) - 8:
        return 0
    (size,) = struct.unpack_from("<q", body, offset)
    return max(0, size)


def _bodies(head: bytes) -> tuple[int, list[tuple[int, int]], bool]:
    """Return a message's body length, its compressed buffers' positions, and whether it is a dictionary."""
    message = _Table(head, _number(head, "<I", 0))
    num_bytes, kind = message.number("<q", 3), message.number("<B", 1)
    if num_bytes < 0:
        raise ValueError("a length below 0")
    batch = None
    if kind == _RECORD_BATCH:
        batch = message.table(2)
    elif kind == _DICTIONARY_BATCH and (dictionary := message.table(2)) is not None:
        batch = dictionary.table(1)
    if batch is None or (batch.table(3) is None and _OLD_COMPRESSION not in head):
        return num_bytes, [], kind == _DICTIONARY_BATCH
    return num_bytes, batch.pairs(2), kind == _DICTIONARY_BATCH


class _Table:
    """Flatbuffer table, preceded by its fields' offsets."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content, self._at = content, at
        self._fields = at - _number(content, "<i", at)
        self._size = _number(content, "<H", self._fields)

    def number(self, form: str, field: int) -> int:
        """Return a number; 0 if it is omitted."""
        place = self._place(field)
        return _number(self._content, form, place) if place else 0

    def table(self, field: int) -> _Table | None:
        """Return the table in a field; None if it is omitted."""
        place = self._place(field)
        return _Table(self._content, place + _number(self._content, "<I", place)) if place else None

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """Return a vector of integer pairs."""
        place = self._place(field)
        if not place:
            return []
        begin = place + _number(self._content, "<I", place)
        end = begin + 4 + 16 * _number(self._content, "<I", begin)
        if end > len(self._content):
            raise ValueError("a vector beyond the end")
        return list(struct.iter_unpack("<qq", self._content[begin + 4 : end]))  # type: ignore[arg-type]

    def _place(self, field: int) -> int:
        """Return a field's position; 0 if it is omitted."""
        entry = 4 + 2 * field
        if entry + 2 > self._size:
            return 0
        offset = _number(self._content, "<H", self._fields + entry)
        return self._at + offset if offset else 0


def _number(content: bytes, form: str, at: int) -> Any:
    """Unpack the number at a position; raise struct.error after the content's end, ValueError before its start."""
    # Python would count a negative position from the end.
    if at < 0:
        raise ValueError("a place before the beginning")
    return struct.unpack_from(form, content, at)[0]
