"""Pages in a Parquet column chunk, as described by their own headers.

Arrow decompresses a page at once and materializes a batch of rows. The memory for this is known neither from the
footer, which may be wrong, nor from the file size: a page of kilobytes may expand to gigabytes, and a short dictionary
text may occur in every row. Each page starts with a header in Thrift's compact protocol. Only the headers are read,
because the file may be in a store.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import pyarrow.parquet as pq

from data_pipeline.prepare.readers.records import ITEM_CHARACTERS, check_block
from data_pipeline.prepare.source_items import FileContentError

DICTIONARY = 2
"""Page type; 0 and 3 are data pages, and Arrow ignores any other."""
DELTA_LENGTH, DELTA_PREFIX = 6, 7
"""Encodings that decode all text lengths at once, or let a text refer to its predecessor's prefix."""
_DATA = {0: 5, 3: 8}
"""Data page types, and the header field that describes each."""
_ENCODING = {0: 2, 3: 4}
"""Field in that description that contains the encoding."""
_HEADER_BYTES, _MOST_HEADER_BYTES = 256, 16 << 20
"""Bytes read at first, and at most (Arrow's own bound). Header statistics contain complete texts."""
ENTRY_BYTES = 16
"""Bytes per list entry in addition to its text: a dictionary index or a text offset."""
_MOST_DEPTH, _MOST_ENTRIES = 16, 1000
"""Limits on nested structs and list length; current headers have neither."""


@dataclass(frozen=True, slots=True)
class Page:
    """Page in a column chunk."""

    kind: int
    compressed_bytes: int
    uncompressed_bytes: int
    num_values: int = 0
    """Values including nulls; 0 for a dictionary page."""
    encoding: int = 0


def column_metadata(table: pq.ParquetFile, group: int, numbers: Sequence[int]) -> list[pq.ColumnChunkMetaData]:
    """Return the footer's column metadata for a row group; raise ArrowException or OSError if it is damaged.

    pyarrow's own classes crash the process on damage (26.0), because some Arrow exceptions are not caught. Its reader
    converts them into Python exceptions, so first request zero rows from these columns.
    """
    for _ in table.reader.iter_batches(0, row_groups=[group], column_indices=list(numbers), use_threads=False):
        pass
    metadata = table.metadata.row_group(group)
    return [metadata.column(number) for number in numbers]


def max_row_bytes(raw: BinaryIO, column: pq.ColumnChunkMetaData) -> int:
    """Return a column chunk's approximate maximum memory per row in bytes; the file position is unchanged.

    Raises FileContentError if a page expands to far more than its size or has an unreadable header.
    """
    at = raw.tell()
    try:
        return max((_longest(page) for page in read_pages(raw, column)), default=0)
    finally:
        raw.seek(at)


def longest_in_lists(raw: BinaryIO, column: pq.ColumnChunkMetaData, num_rows: int) -> tuple[int, int]:
    """Return the approximate memory per row of lists in bytes, and the column chunk's total value count.

    Dictionaries stay encoded, so a row holds the indices of its entries. Like ``max_row_bytes``, raises
    FileContentError if a page expands to far more than its size.
    """
    at = raw.tell()
    longest = values = 0
    try:
        for page in read_pages(raw, column):
            taken = _longest(page)
            values += page.num_values
            if page.kind != DICTIONARY:
                longest = max(longest, taken)
    finally:
        raw.seek(at)
    # Which row a value belongs to is stored in the pages: before they are read, only a mean is known.
    return (longest + ENTRY_BYTES) * (1 + values // max(1, num_rows)), values


def read_pages(raw: BinaryIO, column: pq.ColumnChunkMetaData) -> Iterator[Page]:
    """Yield the pages that Arrow would read; raise FileContentError at an unreadable header, as Arrow would."""
    begin = column.data_page_offset
    if column.dictionary_page_offset:
        begin = min(begin, column.dictionary_page_offset)
    if begin < 0 or column.total_compressed_size < 0:
        raise FileContentError("its footer names no place of the file")
    stop, values = begin + column.total_compressed_size, 0
    while begin < stop and values < column.num_values:
        page, begin = _read_page(raw, begin, stop)
        values += page.num_values
        yield page


def _longest(page: Page) -> int:
    """Return a page's approximate maximum memory per row in bytes; raise FileContentError if it expands too much."""
    check_block(page.uncompressed_bytes, page.compressed_bytes)
    if page.encoding in (DELTA_LENGTH, DELTA_PREFIX):
        check_block(page.num_values * ITEM_CHARACTERS, page.compressed_bytes)
    # Any row may refer to the longest dictionary entry or reuse a long prefix, so assume the full page per row;
    # otherwise assume the mean.
    if page.kind == DICTIONARY or page.encoding == DELTA_PREFIX:
        return page.uncompressed_bytes
    return page.uncompressed_bytes // max(1, page.num_values)


def _read_page(raw: BinaryIO, begin: int, stop: int) -> tuple[Page, int]:
    """Read the page that starts here, and return it with the next page's offset."""
    count = _HEADER_BYTES
    while True:
        raw.seek(begin)
        content = raw.read(min(count, stop - begin))
        reader = _Compact(content)
        try:
            page = _page_of(reader.struct())
            return page, begin + reader.at + page.compressed_bytes
        except (IndexError, struct.error) as error:
            # The header is longer, unless the file or the column ends here.
            if len(content) < count or count >= _MOST_HEADER_BYTES:
                raise FileContentError("the header of a page is cut off") from error
        except (ValueError, KeyError, TypeError) as error:
            raise FileContentError("the header of a page cannot be read") from error
        # Statistics with long texts make headers larger than the first read.
        count *= 16


def _page_of(header: dict[int, Any]) -> Page:
    """Build the page from its header; raise KeyError, TypeError or ValueError if the header is invalid."""
    kind, uncompressed, compressed = (header[field] for field in (1, 2, 3))
    num_values = encoding = 0
    if kind in _DATA:
        num_values, encoding = (header[_DATA[kind]][field] for field in (1, _ENCODING[kind]))
    # Arrow truncates larger numbers to 32 bits.
    if not all(0 <= number < 1 << 31 for number in (kind, uncompressed, compressed, num_values, encoding)):
        raise ValueError("a number out of its range")
    return Page(kind, compressed, uncompressed, num_values, encoding)


class _Compact:
    """Reader for a struct in Thrift's compact protocol; raises IndexError or struct.error if the bytes end early."""

    def __init__(self, content: bytes) -> None:
        self._content = content
        self.at = 0
        """Bytes consumed."""

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """Return a struct's fields by number; texts and lists are skipped."""
        if depth > _MOST_DEPTH:
            raise ValueError("structs within structs")
        fields: dict[int, Any] = {}
        number = 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._whole()
            kind = head & 15
            # Reject both: Arrow takes the last of two equal fields, or the one with the right type, and truncates field
            # numbers to 16 bits.
            if number in fields or not 0 <= number < 1 << 15:
                raise ValueError(f"field {number}")
            fields[number] = kind == 1 if kind in (1, 2) else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        """Return a number or struct; skip values of any other type."""
        if kind in (4, 5, 6):
            return self._whole()
        if kind == 12:
            return self.struct(depth + 1)
        if kind in (1, 2, 3):
            self._skip(1)
        elif kind == 7:
            self._skip(8)
        elif kind == 8:
            self._skip(self._varint())
        elif kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 != 15 else self._varint()
            for _ in range(_bounded_count(count)):
                self._value(head & 15, depth + 1)
        elif kind == 11:
            if count := self._varint():
                kinds = self._byte()
                for _ in range(_bounded_count(count)):
                    self._value(kinds >> 4, depth + 1)
                    self._value(kinds & 15, depth + 1)
        elif kind == 13:
            self._skip(16)
        else:
            raise ValueError(f"no type {kind}")
        return None

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._content):
            raise IndexError

    def _byte(self) -> int:
        self.at += 1
        return self._content[self.at - 1]

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            shift += 7
            if not byte & 0x80:
                return value
            if shift > 63:
                raise ValueError("a number of more than 64 bits")

    def _whole(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)


def _bounded_count(count: int) -> int:
    """Return a list's length; raise ValueError if it is too long."""
    if count > _MOST_ENTRIES:
        raise ValueError("a list in a header")
    return count
