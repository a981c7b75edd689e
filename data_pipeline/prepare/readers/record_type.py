"""Record type detection from a file's columns or first records: texts, conversations, or other data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data_pipeline.prepare.readers.csv_rows import columns_of_csv, columns_of_tsv
from data_pipeline.prepare.readers.json_values import records_in_json, records_in_lines
from data_pipeline.prepare.readers.open_file import OpenFile, open_piece
from data_pipeline.prepare.readers.plain_text import may_be_text
from data_pipeline.prepare.readers.read_files import NUM_CHECK_RECORDS, READ_ERRORS
from data_pipeline.prepare.readers.records import Record
from data_pipeline.prepare.readers.table_rows import has_text, schema_of_arrow, schema_of_parquet
from data_pipeline.prepare.source_items import Fields, File, Skip, full_piece
from data_pipeline.stores.urls import ObjectPath
from longctx.chat.conversation import kind_of

_LIST = "[]"
"""Stands for a column that may contain lists."""


@dataclass(frozen=True, slots=True)
class RecordType:
    """A file's record type; all fields are empty if the file cannot be read."""

    has_text: bool = False
    """True if the text field contains a text."""
    kind: str = ""
    """Conversation or preference type, by its field; empty for other records."""


Judge = Callable[[Mapping[str, Any]], str]
"""Function that returns a record's kind by its fields: ``kind_of`` or ``preference_kind_of``."""


def detect_record_type(file: File, text_field: str, kind_by: Judge = kind_of) -> RecordType:
    """Return a file's record type, from its columns or from the first record that is a text or has a kind.

    Not for plain texts, which have no records.
    """
    try:
        with open_piece(full_piece(file)) as source:
            return _DETECTORS[file.format.kind](source, text_field, kind_by)
    except READ_ERRORS:
        # The check that follows reports the reason.
        return RecordType()


def is_plain_text(file: File, text_field: str) -> bool:
    """Return whether a file without a known suffix is plain text, not JSON or binary; True for files in a store."""
    if isinstance(file.path, ObjectPath):
        return True
    try:
        with open_piece(full_piece(file)) as source:
            return may_be_text(source, Fields(text=text_field))
    except READ_ERRORS:
        return False


def _detect_in_lines(source: OpenFile, text_field: str, kind_by: Judge) -> RecordType:
    return _first(records_in_lines(source), text_field, kind_by)


def _detect_in_json(source: OpenFile, text_field: str, kind_by: Judge) -> RecordType:
    return _first(records_in_json(source), text_field, kind_by)


def _detect_in_csv(source: OpenFile, text_field: str, kind_by: Judge) -> RecordType:
    # A cell may contain JSON, so any column may hold lists.
    return _by_columns(dict.fromkeys(columns_of_csv(source), _LIST), text_field, kind_by)


def _detect_in_tsv(source: OpenFile, text_field: str, kind_by: Judge) -> RecordType:
    return _by_columns(dict.fromkeys(columns_of_tsv(source), _LIST), text_field, kind_by)


def _detect_in_parquet(source: OpenFile, text_field: str, kind_by: Judge) -> RecordType:
    return _by_schema(schema_of_parquet(source), text_field, kind_by)


def _detect_in_arrow(source: OpenFile, text_field: str, kind_by: Judge) -> RecordType:
    return _by_schema(schema_of_arrow(source), text_field, kind_by)


def _first(entries: Iterable[Record | Skip], text_field: str, kind_by: Judge) -> RecordType:
    """Return the first record type found."""
    for entry in itertools.islice(entries, NUM_CHECK_RECORDS):
        if isinstance(entry, Skip) or not isinstance(entry.value, dict):
            continue
        text = entry.value.get(text_field)
        found = RecordType(isinstance(text, str) and text != "", kind_by(entry.value))
        if found != RecordType():
            return found
    return RecordType()


def _by_schema(schema: pa.Schema, text_field: str, kind_by: Judge) -> RecordType:
    shapes: dict[str, Any] = {}
    for field in schema:
        shapes[field.name] = None
        if has_text(schema, field.name) or pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            shapes[field.name] = _LIST
    # ``kind_by`` judges a record by its field names and by which of them hold lists.
    return RecordType(has_text(schema, text_field), kind_by(shapes))


def _by_columns(shapes: dict[str, Any], text_field: str, kind_by: Judge) -> RecordType:
    return RecordType(text_field in shapes, kind_by(shapes))


_DETECTORS: dict[str, Callable[[OpenFile, str, Judge], RecordType]] = {
    "lines": _detect_in_lines,
    "json": _detect_in_json,
    "csv": _detect_in_csv,
    "tsv": _detect_in_tsv,
    "parquet": _detect_in_parquet,
    "arrow": _detect_in_arrow,
}
