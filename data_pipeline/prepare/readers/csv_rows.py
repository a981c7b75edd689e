"""Comma- and tab-separated values: each row is one document, and the first row names the columns.

Uses Python's reader and not Arrow's, whose rows must fit into the fixed size of its read buffer: a cell may contain a
full book. TSV is split by hand: a row is a line, and quotes are ordinary characters. Read as CSV, a quote would
silently swallow the rows up to the next quote.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from data_pipeline.prepare.readers.open_file import OpenFile
from data_pipeline.prepare.readers.records import (
    MAX_RECORD_BYTES,
    Record,
    check_cells,
    check_length,
    find_missing,
    item_of,
    no_field,
)
from data_pipeline.prepare.source_items import Document, Fields, FileContentError, Item, Skip

# The module has one limit for the entire process, and its default, 128 KiB, would reject long documents.
csv.field_size_limit(MAX_RECORD_BYTES)


def read_csv(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one document per comma-separated row; a cell may contain newlines in double quotes."""
    spans = _Spans()
    try:
        yield from _read(source, fields, _csv_rows(_lines(source, ""), spans), "CSV")
    except FileContentError:
        yield from spans.note(source.name)
        raise
    yield from spans.note(source.name)


def read_tsv(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield one document per tab-separated row; a tab or newline in a cell cannot be escaped."""
    yield from _read(source, fields, _tsv_rows(source), "TSV")


def columns_of_csv(source: OpenFile) -> list[str]:
    """Return the comma-separated column names; empty if the first row is invalid."""
    return _header(_csv_rows(_lines(source, ""), _Spans()))


def columns_of_tsv(source: OpenFile) -> list[str]:
    """Return the tab-separated column names."""
    return _header(_tsv_rows(source))


def _header(rows: Iterator[list[str] | str]) -> list[str]:
    row = next(rows, "")
    if isinstance(row, str):
        return []
    return row


def _read(source: OpenFile, fields: Fields, rows: Iterable[list[str] | str], kind: str) -> Iterator[Item]:
    """Yield one document per row, numbered from 0. A string in place of a row describes a fault.

    For conversations a cell contains JSON, as in a table with string columns.
    """
    header, column = None, 0
    # The header has no number.
    for number, row in enumerate(rows, start=-1):
        name = f"{source.name}:{max(number, 0)}"
        if isinstance(row, str):
            yield Skip(name, f"not {kind}", row, is_fault=True)
            if header is None:
                return
        elif header is None:
            header = row
            missing = find_missing(fields, header)
            if missing:
                yield no_field(source.name, missing, header, header)
                return
            column = header.index(fields.names[0])
        elif len(row) != len(header):
            yield Skip(name, f"not {kind}", f"{len(row)} cells where the header has {len(header)}", is_fault=True)
        elif fields.kind == "text":
            yield Document(name, row[column])
        else:
            yield item_of(Record(name, dict(zip(header, row, strict=True))), fields)


@dataclass
class _Spans:
    """Counts of rows that span lines: these may be intended, or start with a quote that is never closed."""

    rows: int = -1
    """All rows below the header."""
    spanning: int = 0
    lines: int = 0
    """Lines in rows that span several."""
    longest: tuple[int, int] = (0, 0)
    """First and last line of the longest row."""

    def add(self, first: int, last: int) -> None:
        """Count a row."""
        self.rows += 1
        if last > first:
            self.spanning += 1
            self.lines += last - first + 1
            self.longest = max(self.longest, (first, last), key=lambda lines: lines[1] - lines[0])

    def note(self, name: str) -> Iterator[Skip]:
        """Yield a note if a file has rows that span lines; these rows are documents all the same."""
        if self.spanning:
            detail = f"{self.spanning:,} of {self.rows:,} rows span {self.lines:,} lines; the longest is lines "
            yield Skip(name, "used, with rows of several lines", f"{detail}{self.longest[0]:,} to {self.longest[1]:,}")


def _csv_rows(lines: Iterator[str], spans: _Spans) -> Iterator[list[str] | str]:
    """Yield each row's cells, or a description of its fault."""
    length = cells = quotes = 0

    def measured() -> Iterator[str]:
        nonlocal length, cells, quotes
        for line in lines:
            length += len(line)
            # Every second substring is in quotes, also if they started on a previous line; doubled quotes cancel out.
            parts = line.split('"')
            cells += sum(part.count(",") for part in parts[quotes % 2 :: 2])
            quotes += len(parts) - 1
            check_length(length)
            check_cells(cells)
            yield line

    # Without strict, a misplaced quote would silently vanish or swallow rows.
    rows = csv.reader(measured(), strict=True)
    while True:
        length = cells = quotes = 0
        first = rows.line_num + 1
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"{rows.line_num - first + 1:,} lines, {first:,} to {rows.line_num:,}: {error}"
            continue
        # A blank line is not a row.
        if row:
            spans.add(first, rows.line_num)
            yield row


def _tsv_rows(source: OpenFile) -> Iterator[list[str]]:
    """Yield each nonempty line's cells."""
    for line in _lines(source, "\n"):
        line = line.removesuffix("\n").removesuffix("\r")
        if line:
            yield _tsv_cells(line)


def _tsv_cells(line: str) -> list[str]:
    check_cells(line.count("\t"))
    return line.split("\t")


def _lines(source: OpenFile, newline: str) -> Iterator[str]:
    """Yield lines with their line ends; raise FileContentError if one exceeds the maximum record length."""
    # Bytes that are not UTF-8 become lone surrogates, so that they invalidate only their own row.
    text = io.TextIOWrapper(source.stream, encoding="utf-8-sig", errors="surrogateescape", newline=newline)
    try:
        while line := text.readline(MAX_RECORD_BYTES + 1):
            check_length(len(line))
            yield line
    finally:
        # Detach, because TextIOWrapper would close the file, whose position is still needed.
        if not source.stream.closed:
            text.detach()
