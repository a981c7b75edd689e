"""Comma- and tab-separated values: a row is one document, its columns named by the first row.

Python's own reader and not Arrow's, whose rows must fit into a block of fixed size: a cell here may be a whole book.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from data_pipeline.prepare.documents import Document, Item, Skip
from data_pipeline.prepare.readers.opened import OpenFile
from data_pipeline.prepare.readers.records import MAX_RECORD_BYTES, check_length, no_field

# The module has one limit for the whole process; its 128 KiB would refuse long documents.
csv.field_size_limit(MAX_RECORD_BYTES)


def read_csv(opened: OpenFile, text_field: str) -> Iterator[Item]:
    """Yield the cells of column ``text_field``, separated by commas."""
    return _read(opened, text_field, ",")


def read_tsv(opened: OpenFile, text_field: str) -> Iterator[Item]:
    """Yield the cells of column ``text_field``, separated by tabs."""
    return _read(opened, text_field, "\t")


def _read(opened: OpenFile, text_field: str, delimiter: str) -> Iterator[Item]:
    """Yield one document a row, numbered from 0; a cell may hold newlines in double quotes."""
    # Bytes that are not UTF-8 become lone surrogates, so that they cost their own row alone.
    text = io.TextIOWrapper(opened.stream, encoding="utf-8-sig", errors="surrogateescape", newline="")
    # strict: a quote out of its place would otherwise vanish, or swallow rows, without a word.
    rows = csv.reader(_lines(text), delimiter=delimiter, strict=True)
    number, header, column = 0, None, 0
    while True:
        first_line = rows.line_num + 1
        name = f"{opened.name}:{number}"
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield Skip(name, "not CSV", f"lines {first_line} to {rows.line_num}: {error}", is_fault=True)
            if header is None:
                return
            number += 1
            continue
        # A blank line is no row.
        if not row:
            continue
        if header is None:
            header = row
            if text_field not in header:
                yield no_field(opened.name, text_field, header, header)
                return
            column = header.index(text_field)
            continue
        if len(row) == len(header):
            yield Document(name, row[column])
        else:
            yield Skip(name, "not CSV", f"{len(row)} cells where the header has {len(header)}", is_fault=True)
        number += 1


def _lines(text: io.TextIOWrapper) -> Iterator[str]:
    """Yield lines with their ends, none longer than a record may be."""
    while line := text.readline(MAX_RECORD_BYTES + 1):
        check_length(len(line))
        yield line
