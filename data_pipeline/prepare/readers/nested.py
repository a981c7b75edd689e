"""Table rows as records: the columns that a conversation needs, and a row's size as Python values.

Lists, structs and dictionaries can refer to one text any number of times within kilobytes, and each reference becomes a
separate Python value. So rows are measured in Arrow before any value is created.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from data_pipeline.prepare.readers.records import (
    NO_CONVERSATION,
    Record,
    check_cells,
    check_expansion,
    check_length,
)
from data_pipeline.prepare.source_items import PAIRS, Fields, FilePiece, Skip
from longctx.chat.conversation import MEDIA, copy_json
from longctx.chat.preference import COMPARED

_OPTIONAL_COLUMNS = ("tools", "system", *MEDIA)
"""Optional columns in addition to a conversation's own."""
_TO_BINARY = {
    pa.string(): pa.binary(),
    pa.large_string(): pa.large_binary(),
    pa.string_view(): pa.binary_view(),
}

_MOST_DEPTH, _SHOWN_TYPE = 32, 100
_VALUES_TOGETHER, _BYTES_TOGETHER = 1 << 18, 1 << 25
"""Limits below which rows are converted to Python values together; larger batches are converted row by row."""
_NO_VALUES = (ValueError, ArithmeticError, LookupError)
"""Errors that pyarrow raises for values without a Python equivalent: duplicate struct fields, some times, invalid
UTF-8."""
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_VIEWS = (pa.string_view(), pa.binary_view())


def columns_of(schema: pa.Schema, fields: Fields) -> list[str]:
    """Return the columns needed for documents."""
    if fields.kind in ("text", PAIRS):
        return list(fields.names)
    # Leave duplicated optional columns out; a duplicated required column is rejected by name.
    candidates = _OPTIONAL_COLUMNS
    if fields.kind == COMPARED:
        candidates = (*_OPTIONAL_COLUMNS, "prompt")
    optional = tuple(name for name in candidates if schema.names.count(name) == 1)
    return list(fields.names + optional)


def find_odd(schema: pa.Schema, fields: Fields) -> str:
    """Return the problem with the columns for conversations; empty if they can be read."""
    for name in columns_of(schema, fields):
        if schema.names.count(name) != 1:
            return f"there are several columns {name!r}"
        kind = schema.field(name).type
        if not _is_plain(kind, _MOST_DEPTH):
            return f"column {name!r} holds a {str(kind)[:_SHOWN_TYPE]}"
    return ""


def records_in(batch: pa.RecordBatch, piece: FilePiece, first: int) -> Iterator[Record | Skip]:
    """Yield a batch's rows as records; raise FileContentError if a row expands too much."""
    rows: list[dict[str, Any]] = []
    values, num_bytes = _count_values(batch.columns)
    if values <= _VALUES_TOGETHER and num_bytes <= _BYTES_TOGETHER:
        # Unreadable values are skipped row by row below.
        with contextlib.suppress(*_NO_VALUES):
            rows = batch.to_pylist()
    for number in range(len(batch)):
        name = f"{piece.file.name}:{first + number}"
        if rows:
            yield Record(name, _present(rows[number]))
        else:
            yield _record(batch.slice(number, 1), name, piece)


def _record(row: pa.RecordBatch, name: str, piece: FilePiece) -> Record | Skip:
    """Convert one row to a record, or to a Skip with the reason; raise FileContentError if it expands too much."""
    values, num_bytes = _count_values(row.columns)
    check_cells(values)
    check_length(num_bytes)
    check_expansion(num_bytes, piece.size)
    try:
        return Record(name, _present(row.to_pylist()[0]))
    except UnicodeDecodeError as error:
        return Skip(name, "not UTF-8", str(error), is_fault=True)
    except _NO_VALUES as error:
        return Skip(name, NO_CONVERSATION, str(error), is_fault=True)


def _present(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with null-valued keys dropped inside its values."""
    return {name: copy_json(value, nulls=False) for name, value in row.items()}


def as_binary(column: pa.Array) -> pa.Array:
    """Replace UTF-8 types by binary ones, so that only rows with invalid UTF-8 are lost."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return pa.DictionaryArray.from_arrays(column.indices, as_binary(column.dictionary), safe=False)
    if pa.types.is_list(kind):
        inner = as_binary(column.values)
        return _rebuilt(column, pa.list_(kind.value_field.with_type(inner.type)), [inner])
    if pa.types.is_large_list(kind):
        inner = as_binary(column.values)
        return _rebuilt(column, pa.large_list(kind.value_field.with_type(inner.type)), [inner])
    if pa.types.is_struct(kind):
        parts = [as_binary(column.field(number)) for number in range(kind.num_fields)]
        fields = [field.with_type(part.type) for field, part in zip(kind, parts, strict=True)]
        return _rebuilt(column, pa.struct(fields), parts)
    if kind in _TO_BINARY:
        return column.view(_TO_BINARY[kind])
    return column


def _rebuilt(column: pa.Array, kind: pa.DataType, parts: Sequence[pa.Array]) -> pa.Array:
    """Return a list or struct with the same structure as ``column`` and other children."""
    # Build from buffers, because Arrow casts views incorrectly if a child has the null type.
    assert not column.offset, "a column of a file begins with its buffers"
    own = column.buffers()[: 1 if pa.types.is_struct(kind) else 2]
    return pa.Array.from_buffers(kind, len(column), own, children=list(parts))


def _is_plain(kind: pa.DataType, depth: int) -> bool:
    """Return whether ``_count_values`` supports a type: no unions, run-end encoding, list views or extension types."""
    if not depth:
        return False
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return _is_plain(kind.value_type, depth - 1)
    if pa.types.is_dictionary(kind):
        return kind.value_type in _TEXTS
    if pa.types.is_struct(kind):
        return all(_is_plain(field.type, depth - 1) for field in kind)
    return not pa.types.is_nested(kind) and not isinstance(kind, pa.BaseExtensionType)


def _count_values(columns: list[pa.Array]) -> tuple[int, int]:
    """Count the values in columns, including lists and structs, and the bytes that they expand to."""
    values = num_bytes = 0
    left = list(columns)
    # Iterative, because a schema may nest arbitrarily deep.
    while left:
        column = left.pop()
        values += len(column)
        kind = column.type
        if pa.types.is_dictionary(kind):
            num_bytes += _named_bytes(column)
        elif pa.types.is_nested(kind):
            # flatten() returns a list's values or a struct's fields for these rows only.
            inner = column.flatten()
            if isinstance(inner, pa.Array):
                inner = [inner]
            left += inner
        elif kind in _VIEWS:
            num_bytes += _viewed_bytes(column)
        else:
            num_bytes += column.nbytes
    return values, num_bytes


def _named_bytes(column: pa.DictionaryArray) -> int:
    """Return the total text length in a dictionary column, counting each text once per reference."""
    value_counts = column.indices.drop_null().value_counts()
    # Measure only referenced entries: otherwise a single row would take as long as the full dictionary.
    named = as_binary(column.dictionary).take(value_counts.field(0))
    lengths = pc.call_function("binary_length", [named]).to_numpy(zero_copy_only=False).astype(np.int64)
    return int(lengths @ value_counts.field(1).to_numpy())


def _viewed_bytes(column: pa.Array) -> int:
    """Return the total text length in a column of views: many views may refer to the same bytes."""
    # A view is 16 bytes, with the length in the first four. Arrow has no function for it.
    views = np.frombuffer(column.buffers()[1], np.int32).reshape(-1, 4)
    lengths = views[column.offset : column.offset + len(column), 0].astype(np.int64)
    return int(lengths[column.is_valid().to_numpy(zero_copy_only=False)].sum())
