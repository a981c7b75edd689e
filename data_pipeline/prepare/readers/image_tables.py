"""Parquet tables with images: each row is one image.

The image column holds a file's bytes, plain or as Hugging Face's struct of ``bytes`` and ``path``. Labels are whole
numbers or texts; Hugging Face's schema may list the names for numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from data_pipeline.prepare.readers.open_file import OpenFile, open_piece
from data_pipeline.prepare.readers.records import no_field
from data_pipeline.prepare.readers.table_rows import batch_rows, open_parquet, schema_of_parquet
from data_pipeline.prepare.source_items import (
    Document,
    Fields,
    File,
    FileContentError,
    Item,
    RawImage,
    Skip,
    full_piece,
)
from longctx.images.image_format import MOST_CLASSES
from longctx.untrusted.strict_json import parse_json

_METADATA = b"huggingface"
"""Schema key with the features of a `datasets` table."""
_BYTES = "bytes"
NO_LABEL = "no label"


def check_image_table(source: OpenFile, fields: Fields) -> Skip | None:
    """Return a Skip if the schema has no column with images, or labels of an unusable type."""
    return _find_problem(source.name, schema_of_parquet(source), fields)


def read_image_table(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one image per row, in batches of rows."""
    with open_parquet(source) as table:
        schema = table.schema_arrow
        problem = _find_problem(source.name, schema, fields)
        if problem is not None:
            yield problem
            return
        columns = [_column_of(schema, fields.text)]
        has_labels = fields.label in schema.names
        names: tuple[str, ...] = ()
        if has_labels:
            columns.append(fields.label)
            names = class_names(schema, fields.label)
        groups = range(table.num_row_groups)
        if source.piece.stop is not None:
            groups = range(source.piece.start, source.piece.stop)
        done, total = 0, sum(table.metadata.row_group(group).num_rows for group in groups)
        for group in groups:
            rows = batch_rows(source.raw, table, group, columns)
            for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=columns):
                contents = batch.column(fields.text)
                if pa.types.is_struct(contents.type):
                    # flatten() also gives a null for each null struct.
                    contents = contents.flatten()[0]
                labels = batch.column(fields.label) if has_labels else None
                for row, content in enumerate(contents):
                    name = f"{source.name}:{source.piece.first + done + row}"
                    label = None if labels is None else labels[row].as_py()
                    yield _image(name, content.as_py(), label, names, has_labels=has_labels)
                done += batch.num_rows
                # The footer may be wrong.
                source.share = min(1.0, done / max(1, total))


def label_type(schema: pa.Schema, fields: Fields) -> str:
    """Return how a table labels its images: ``numbers``, ``texts``, or empty without labels."""
    if fields.label not in schema.names:
        return ""
    kind = schema.field(fields.label).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return "numbers"
    return "texts"


def class_names(schema: pa.Schema, label_field: str) -> tuple[str, ...]:
    """Return the class names in Hugging Face's schema; empty without them."""
    try:
        feature: Any = parse_json((schema.metadata or {})[_METADATA])["info"]["features"][label_field]
        names = feature["names"]
    except (ValueError, LookupError, TypeError):
        return ()
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        return ()
    return tuple(names)


def read_labels(file: File, fields: Fields) -> set[int] | set[str]:
    """Return the distinct labels in a table; raise FileContentError for too many."""
    found: set[Any] = set()
    with open_piece(full_piece(file)) as source, open_parquet(source) as table:
        for group in range(table.num_row_groups):
            rows = batch_rows(source.raw, table, group, [fields.label])
            for batch in table.iter_batches(batch_size=rows, row_groups=[group], columns=[fields.label]):
                found.update(batch.column(0).unique().to_pylist())
                if len(found) > MOST_CLASSES:
                    raise FileContentError(f"column {fields.label!r} has more than {MOST_CLASSES:,} labels")
    return found - {None}


def _image(name: str, content: bytes | None, label: Any, names: tuple[str, ...], *, has_labels: bool) -> Item:
    """Return a row's image, or a Skip with the reason."""
    if content is None:
        return Skip(name, "null", "no bytes: only a path, or nothing", is_fault=True)
    if not has_labels:
        return Document(name, "", image=RawImage(content, None))
    # Hugging Face's files mark a hidden label by -1.
    if label is None or label == -1:
        return Skip(name, NO_LABEL, is_fault=True)
    if names and isinstance(label, int) and 0 <= label < len(names):
        label = names[label]
    return Document(name, "", image=RawImage(content, label))


def _find_problem(name: str, schema: pa.Schema, fields: Fields) -> Skip | None:
    """Return a Skip if the columns cannot be read as images and labels."""
    with_images = [field.name for field in schema if _holds_images(field.type)]
    if fields.text not in with_images:
        found = no_field(name, fields.text, schema.names, with_images)
        # The columns that hold bytes are the likely ones.
        return Skip(name, found.reason, found.detail.replace("with text:", "with bytes:"), is_fault=True)
    for column in (fields.text, fields.label):
        if schema.names.count(column) > 1:
            return Skip(name, "not images", f"there are several columns {column!r}", is_fault=True)
    if fields.label in schema.names and not _holds_labels(schema.field(fields.label).type):
        kind = str(schema.field(fields.label).type)[:100]
        detail = f"column {fields.label!r} holds {kind}, not whole numbers or texts"
        return Skip(name, "no labels", detail, is_fault=True)
    return None


def _column_of(schema: pa.Schema, name: str) -> str:
    """Return the path of the column with an image's bytes."""
    if pa.types.is_struct(schema.field(name).type):
        return f"{name}.{_BYTES}"
    return name


def _holds_images(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        index = kind.get_field_index(_BYTES)
        return index >= 0 and _holds_images(kind.field(index).type)
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _holds_labels(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    return pa.types.is_integer(kind) or pa.types.is_string(kind) or pa.types.is_large_string(kind)
