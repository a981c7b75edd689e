"""An Arrow IPC stream whose messages are checked before Arrow sees them.

A buffer of a batch may be compressed; its first 8 bytes say what it becomes, and Arrow allocates and fills that, for
each buffer of the batch, before anything of it can be asked for. Where the buffers lie stands in the head of the
message, a flatbuffer: tables that name their fields by offset (``Message``, ``RecordBatch`` and ``DictionaryBatch`` of
Arrow's ``Message.fbs``). What cannot be read so cannot be read by Arrow, which verifies it first.
"""

from __future__ import annotations

import io
import struct
from typing import Any, BinaryIO

import pyarrow as pa

from data_pipeline.prepare.readers.records import FREE_BYTES, check_block

_CONTINUATION = b"\xff\xff\xff\xff"
_DICTIONARY_BATCH, _RECORD_BATCH = 2, 3
"""Types of a message; those of others have no body that Arrow decodes."""
_OLD_COMPRESSION = b"ARROW:experimental_compression"
"""How Arrow 0.17 said that buffers are compressed."""


class CheckedMessages(io.RawIOBase):
    """The bytes of a stream of messages; DamageError for a batch that becomes too much, ArrowInvalid for none."""

    def __init__(self, stream: BinaryIO, most_bytes: int) -> None:
        """``most_bytes``: no body is longer, nor all dictionaries, whatever the heads say."""
        super().__init__()
        self._stream, self._most_bytes = stream, most_bytes
        # Of the message under way.
        self._parts: list[bytes] = []
        # Of all dictionary batches, which may each add to the one before.
        self._dictionary_bytes = self._dictionary_stated = 0
        self._is_over = False

    def readable(self) -> bool:
        """True: it can be read."""
        return True

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, as many as asked for if there are."""
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
            # Arrow asks for a part as it is: no body is copied.
            found.append(part[:size])
            size -= len(found[-1])
        return found[0] if len(found) == 1 else b"".join(found)

    def _message(self) -> tuple[bytes, ...]:
        """Return the next message's length, head and body; behind the last one nothing is looked at."""
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
    """Return what a compressed buffer says that it becomes."""
    if length <= 0 or not 0 <= offset <= len(body) - 8:
        return 0
    (size,) = struct.unpack_from("<q", body, offset)
    return max(0, size)


def _bodies(head: bytes) -> tuple[int, list[tuple[int, int]], bool]:
    """Return the length of a message's body, where in it compressed buffers lie, and whether it is a dictionary."""
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
    """A table of a flatbuffer: before it lies where its fields are."""

    def __init__(self, content: bytes, at: int) -> None:
        self._content, self._at = content, at
        self._fields = at - _number(content, "<i", at)
        self._size = _number(content, "<H", self._fields)

    def number(self, form: str, field: int) -> int:
        """Return a number; 0 where it is left out."""
        place = self._place(field)
        return _number(self._content, form, place) if place else 0

    def table(self, field: int) -> _Table | None:
        """Return the table in a field, if there is one."""
        place = self._place(field)
        return _Table(self._content, place + _number(self._content, "<I", place)) if place else None

    def pairs(self, field: int) -> list[tuple[int, int]]:
        """Return a vector of pairs of whole numbers."""
        place = self._place(field)
        if not place:
            return []
        begin = place + _number(self._content, "<I", place)
        end = begin + 4 + 16 * _number(self._content, "<I", begin)
        if end > len(self._content):
            raise ValueError("a vector beyond the end")
        return list(struct.iter_unpack("<qq", self._content[begin + 4 : end]))  # type: ignore[arg-type]

    def _place(self, field: int) -> int:
        """Return where a field lies; 0 where it is left out."""
        entry = 4 + 2 * field
        if entry + 2 > self._size:
            return 0
        offset = _number(self._content, "<H", self._fields + entry)
        return self._at + offset if offset else 0


def _number(content: bytes, form: str, at: int) -> Any:
    """Return the number at a place; struct.error beyond the content."""
    # Python would count it from the end.
    if at < 0:
        raise ValueError("a place before the beginning")
    return struct.unpack_from(form, content, at)[0]
