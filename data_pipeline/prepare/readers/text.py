"""Plain text: a file is one document, unless it holds records of JSON and nobody said that they are meant as text."""

from __future__ import annotations

from collections.abc import Iterator

from data_pipeline.prepare.documents import Document, Item, Skip
from data_pipeline.prepare.readers.opened import OpenFile
from data_pipeline.prepare.readers.records import read_bounded
from data_pipeline.prepare.readers.unnamed_json import begin_of_text, find_records

_BINARY_PROBE_BYTES = 8192


def check_text(opened: OpenFile, text_field: str) -> Skip | None:
    """Return why a file is no text, judged by its beginning; None if it may be one."""
    if opened.file.format.is_meant:
        return None
    return find_records(begin_of_text(opened.stream), text_field, opened.name)


def read_text(opened: OpenFile, text_field: str) -> Iterator[Item]:
    """Yield the whole file as one document, bytes unchanged: no newline or byte-order-mark is touched."""
    head = begin_of_text(opened.stream)
    # git's test for a binary file: a zero byte near the beginning.
    if b"\0" in head[:_BINARY_PROBE_BYTES]:
        yield Skip(opened.name, "binary")
        return
    if not opened.file.format.is_meant:
        records = find_records(head, text_field, opened.name)
        if records is not None:
            yield records
            return
    # A plain file is as large as it is on disk; some kilobytes of a compressed one can become terabytes.
    if opened.file.format.compression:
        rest = read_bounded(opened.stream)
    else:
        rest = opened.stream.read()
    try:
        yield Document(opened.name, (head + rest).decode())
    except UnicodeDecodeError:
        yield Skip(opened.name, "not UTF-8")
