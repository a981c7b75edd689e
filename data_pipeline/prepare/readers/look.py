"""Record type detection from a file's columns or first records: texts, conversations, or other data."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from data_pipeline.prepare.documents import Fields, File, Skip, whole
from data_pipeline.prepare.readers.csv_rows import columns_of_csv, columns_of_tsv
from data_pipeline.prepare.readers.json_values import records_in_json, records_in_lines
from data_pipeline.prepare.readers.opened import OpenFile, opened
from data_pipeline.prepare.readers.read import CHECKED_RECORDS, DAMAGE
from data_pipeline.prepare.readers.records import Record
from data_pipeline.prepare.readers.tables import has_text, schema_of_arrow, schema_of_parquet
from data_pipeline.prepare.readers.text import may_be_text
from data_pipeline.stores.urls import ObjectPath
from longctx.chat.conversation import kind_of

_LIST = "[]"
"""Stands for a column that may contain lists."""


@dataclass(frozen=True, slots=True)
class Look:
    """A file's record type; all fields are empty if the file cannot be read."""

    has_text: bool = False
    """True if the text field contains a text."""
    kind: str = ""
    """Conversation type, by its field; empty for other records."""


def look(file: File, text_field: str) -> Look:
    """Return a file's record type, from its columns or from the first record that is a text or a conversation.

    Not for plain texts, which have no records.
    """
    try:
        with opened(whole(file)) as source:
            return _LOOKS[file.format.kind](source, text_field)
    except DAMAGE:
        # The check that follows reports the reason.
        return Look()


def is_plain_text(file: File, text_field: str) -> bool:
    """Return whether a file without a known suffix is plain text, not JSON or binary; True for files in a store."""
    if isinstance(file.path, ObjectPath):
        return True
    try:
        with opened(whole(file)) as source:
            return may_be_text(source, Fields(text=text_field))
    except DAMAGE:
        return False


def _look_at_lines(source: OpenFile, text_field: str) -> Look:
    return _first(records_in_lines(source), text_field)


def _look_at_json(source: OpenFile, text_field: str) -> Look:
    return _first(records_in_json(source), text_field)


def _look_at_csv(source: OpenFile, text_field: str) -> Look:
    # A cell may contain JSON, so any column may hold lists.
    return _by_columns(dict.fromkeys(columns_of_csv(source), _LIST), text_field)


def _look_at_tsv(source: OpenFile, text_field: str) -> Look:
    return _by_columns(dict.fromkeys(columns_of_tsv(source), _LIST), text_field)


def _look_at_parquet(source: OpenFile, text_field: str) -> Look:
    return _by_schema(schema_of_parquet(source), text_field)


def _look_at_arrow(source: OpenFile, text_field: str) -> Look:
    return _by_schema(schema_of_arrow(source), text_field)


def _first(entries: Iterable[Record | Skip], text_field: str) -> Look:
    """Return the first record type found."""
    for entry in itertools.islice(entries, CHECKED_RECORDS):
        if isinstance(entry, Skip) or not isinstance(entry.value, dict):
            continue
        text = entry.value.get(text_field)
        found = Look(isinstance(text, str) and text != "", kind_of(entry.value))
        if found != Look():
            return found
    return Look()


def _by_schema(schema: pa.Schema, text_field: str) -> Look:
    shapes: dict[str, Any] = {}
    for field in schema:
        shapes[field.name] = None
        if has_text(schema, field.name) or pa.types.is_list(field.type) or pa.types.is_large_list(field.type):
            shapes[field.name] = _LIST
    # ``kind_of`` judges a record by its field names and by which of them hold lists.
    return Look(has_text(schema, text_field), kind_of(shapes))


def _by_columns(shapes: dict[str, Any], text_field: str) -> Look:
    return Look(text_field in shapes, kind_of(shapes))


_LOOKS: dict[str, Callable[[OpenFile, str], Look]] = {
    "lines": _look_at_lines,
    "json": _look_at_json,
    "csv": _look_at_csv,
    "tsv": _look_at_tsv,
    "parquet": _look_at_parquet,
    "arrow": _look_at_arrow,
}
