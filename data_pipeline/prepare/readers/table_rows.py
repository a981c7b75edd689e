"""Parquet and Arrow tables: each row is one document."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from data_pipeline.prepare.readers.arrow_messages import BoundedMessages
from data_pipeline.prepare.readers.nested import as_binary, columns_of, find_odd, records_in
from data_pipeline.prepare.readers.open_file import OpenFile
from data_pipeline.prepare.readers.parquet_pages import ENTRY_BYTES, column_metadata, longest_in_lists, max_row_bytes
from data_pipeline.prepare.readers.records import (
    MAX_RECORD_BYTES,
    NO_CONVERSATION,
    check_block,
    find_missing,
    items_of,
    no_field,
)
from data_pipeline.prepare.source_items import Document, Fields, FileContentError, FilePiece, Item, Skip

_ROWS = 256
_BATCH_BYTES = 1 << 25
"""Approximate text bytes per batch: rows of megabytes are read one by one."""
_FILE_MAGIC = b"ARROW1"
_NOT_ARROW = (pa.ArrowInvalid, OSError)
"""Arrow raises these for invalid bytes, the system for a failing disk; ``read`` distinguishes them."""
_FILE_STREAM = 8
"""Start of the stream in an Arrow IPC file, after the magic and two padding bytes."""
_FILE_END = 10
"""Bytes after the footer: its length in four bytes, and the magic."""


def read_parquet(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one document per row, in batches of rows: a table may be larger than memory."""
    with open_parquet(source) as table:
        problem = _find_problem(source.name, table.schema_arrow, fields)
        if problem is not None:
            yield problem
            return
        columns, dictionaries = columns_of(table.schema_arrow, fields), []
        # A text in a list may occur any number of times per row: keep dictionaries encoded, so that it is stored once.
        if fields.kind != "text":
            dictionaries = [table.schema.column(leaf).path for leaf in _leaves(table, columns)]
    with open_parquet(source, dictionaries) as table:
        groups = range(table.num_row_groups)
        if source.piece.stop is not None:
            groups = range(source.piece.start, source.piece.stop)
        done, total = 0, sum(table.metadata.row_group(group).num_rows for group in groups)
        # Batch sizes are chosen per row group: one may have rows of megabytes, and another short ones.
        for group in groups:
            rows = batch_rows(source.raw, table, group, columns, is_nested=fields.kind != "text")
            for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
                yield from _items(batch, columns, fields, source.piece, source.piece.first + done)
                done += batch.num_rows
                # The footer may be wrong.
                source.share = min(1.0, done / max(1, total))


def read_arrow(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one document per row in an Arrow IPC file or stream, batch by batch."""
    schema, batches = _open_arrow(source)
    problem = _find_problem(source.name, schema, fields)
    if problem is not None:
        yield problem
        return
    columns = columns_of(schema, fields)
    number = 0
    for batch in batches:
        chosen = batch.select(columns)
        # Arrow trusts the offsets in a file, and damaged ones would read beyond the buffer. UTF-8 is not validated
        # here: a million views on one text would be checked one by one.
        for column in chosen.columns:
            # Validate lengths first: Arrow crashes the process if a child is shorter than its parent requires.
            column.validate()
            as_binary(column).validate(full=True)
        for start in range(0, len(chosen), _ROWS):
            yield from _items(chosen.slice(start, _ROWS), columns, fields, source.piece, number + start)
        number += len(chosen)


def check_parquet(source: OpenFile, fields: Fields) -> Skip | None:
    """Check the schema; return a Skip if the file cannot be read."""
    return _find_problem(source.name, schema_of_parquet(source), fields)


def check_arrow(source: OpenFile, fields: Fields) -> Skip | None:
    """Check the schema; return a Skip if the file cannot be read."""
    return _find_problem(source.name, schema_of_arrow(source), fields)


def schema_of_parquet(source: OpenFile) -> pa.Schema:
    """Return the columns and their types."""
    with open_parquet(source) as table:
        return table.schema_arrow


def schema_of_arrow(source: OpenFile) -> pa.Schema:
    """Return the columns and their types."""
    schema, _ = _open_arrow(source)
    return schema


def has_text(schema: pa.Schema, name: str) -> bool:
    """Return whether a text column has this name."""
    return name in schema.names and _is_text(schema.types[schema.names.index(name)])


def _items(
    batch: pa.RecordBatch, columns: Sequence[str], fields: Fields, piece: FilePiece, first: int
) -> Iterator[Item]:
    """Yield the documents in some rows."""
    if fields.kind == "text":
        yield from _rows(batch.column(0), piece.file.name, first)
    else:
        yield from items_of(records_in(batch.select(columns), piece, first), fields)


def open_parquet(source: OpenFile, dictionaries: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a table; columns in ``dictionaries`` stay dictionary-encoded if they are stored so."""
    if source.file.format.compression:
        raise pa.ArrowInvalid("Parquet within another compression; decompress the file first")
    # Buffered without read-ahead: otherwise a column's full row group is in memory.
    source.raw.seek(0)
    return pq.ParquetFile(source.raw, buffer_size=1 << 20, pre_buffer=False, read_dictionary=list(dictionaries))


def _leaves(table: pq.ParquetFile, columns: Sequence[str]) -> list[int]:
    """Return the leaf column indices at and below these columns."""
    paths = [table.schema.column(number).path for number in range(len(table.schema))]
    return [number for number, path in enumerate(paths) if any(f"{path}.".startswith(f"{name}.") for name in columns)]


def batch_rows(
    raw: BinaryIO, table: pq.ParquetFile, group: int, columns: Sequence[str], *, is_nested: bool = False
) -> int:
    """Return how many rows of a row group to decompress at once."""
    # Arrow materializes a batch's rows. A dictionary with one long text and a thousand rows that refer to it takes
    # kilobytes in the file, so assume that a row is as large as its dictionary may be (``parquet_pages``). Lists keep
    # their dictionaries encoded: there the entry count can grow too large within kilobytes.
    metadata = column_metadata(table, group, _leaves(table, columns))
    if is_nested:
        num_rows = table.metadata.row_group(group).num_rows
        sizes = [longest_in_lists(raw, column, num_rows) for column in metadata]
        longest = sum(size for size, _ in sizes)
        compressed = sum(column.total_compressed_size for column in metadata)
        check_block(ENTRY_BYTES * max((values for _, values in sizes), default=0), compressed)
    else:
        longest = max((max_row_bytes(raw, column) for column in metadata), default=1)
    return max(1, min(_ROWS, _BATCH_BYTES // max(1, longest)))


def _open_arrow(source: OpenFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return schema and batches; the first bytes determine whether the format is a file or a stream."""
    is_file = not source.file.format.compression and source.raw.read(len(_FILE_MAGIC)) == _FILE_MAGIC
    if not source.file.format.compression:
        source.raw.seek(0)
    if is_file:
        source.raw.seek(_FILE_STREAM)
    most_bytes = source.file.size
    if source.file.format.compression:
        most_bytes = MAX_RECORD_BYTES
    stream = pa.ipc.open_stream(BoundedMessages(source.stream, most_bytes))
    if is_file:
        return stream.schema, _file_batches(stream, source)
    return stream.schema, _stream_batches(stream, source)


def _stream_batches(stream: pa.ipc.RecordBatchStreamReader, source: OpenFile) -> Iterator[pa.RecordBatch]:
    """Yield the batches in an Arrow IPC stream; raise FileContentError if more data follows its end."""
    yield from stream
    # Arrow stops there and silently ignores a second stream.
    if source.stream.read(1):
        raise FileContentError("there is more behind the end of the stream")


def _file_batches(stream: pa.ipc.RecordBatchStreamReader, source: OpenFile) -> Iterator[pa.RecordBatch]:
    """Yield the batches in an Arrow IPC file, in the order of the stream that it contains.

    Its footer is at the end: a truncated file has none, and in two concatenated files the second footer points into the
    first file. Both raise FileContentError after the batches that can be read.
    """
    raw, begin = source.raw, source.raw.tell()
    problem, count = None, 0
    try:
        count = pa.ipc.open_file(raw).num_record_batches
    except _NOT_ARROW as error:
        problem = error
    raw.seek(begin)
    done = 0
    try:
        for batch in stream:
            yield batch
            done += 1
    except _NOT_ARROW:
        # Older writers omit the end-of-stream marker, so the footer follows, which is not part of the stream.
        if problem is not None or done < count:
            raise
        return
    if problem is not None:
        raise problem
    if raw.tell() != _index_at(raw):
        raise FileContentError("there is more behind its last batch")


def _index_at(raw: BinaryIO) -> int:
    """Return the footer's offset in an Arrow IPC file; the file position is unchanged."""
    at = raw.tell()
    end = raw.seek(-_FILE_END, os.SEEK_END)
    length = int.from_bytes(raw.read(_FILE_END - len(_FILE_MAGIC)), "little")
    raw.seek(at)
    return end - length


def _find_problem(name: str, schema: pa.Schema, fields: Fields) -> Skip | None:
    """Return a Skip if a required column is missing or has the wrong type."""
    with_text = [field.name for field in schema if _is_text(field.type)]
    names = with_text
    if fields.kind != "text":
        names = schema.names
    missing = find_missing(fields, names)
    if missing:
        return no_field(name, missing, schema.names, with_text)
    odd = ""
    if fields.kind != "text":
        odd = find_odd(schema, fields)
    if odd:
        return Skip(name, NO_CONVERSATION, odd, is_fault=True)
    return None


def _is_text(column: pa.DataType) -> bool:
    """Return whether a column contains text, or bytes that may be text."""
    if pa.types.is_dictionary(column):
        return _is_text(column.value_type)
    tests = (
        pa.types.is_string,
        pa.types.is_large_string,
        pa.types.is_string_view,
        pa.types.is_binary,
        pa.types.is_large_binary,
    )
    return any(test(column) for test in tests)


def _rows(column: pa.Array, file: str, first: int) -> Iterator[Item]:
    """Yield the documents in some rows of the text column."""
    for number, text in enumerate(_values(column), start=first):
        name = f"{file}:{number}"
        try:
            if isinstance(text, bytes):
                text = text.decode()
        except UnicodeDecodeError as error:
            yield Skip(name, "not UTF-8", str(error), is_fault=True)
            continue
        if text is None:
            yield Skip(name, "null")
        else:
            yield Document(name, text)


def _values(column: pa.Array) -> Iterator[str | bytes | None]:
    """Yield a column's texts one by one, resolving dictionary entries."""
    if not pa.types.is_dictionary(column.type):
        for value in as_binary(column):
            yield value.as_py()
        return
    entries = as_binary(column.dictionary)
    for index in column.indices:
        yield entries[index.as_py()].as_py() if index.is_valid else None
