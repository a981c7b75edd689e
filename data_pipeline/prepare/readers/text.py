"""Plain text: a file is one document, unless it holds records of JSON and nobody said that they are meant as text.

Among conversations it is none of them, and is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

from data_pipeline.prepare.documents import Document, Fields, Item, Skip
from data_pipeline.prepare.readers.opened import OpenFile
from data_pipeline.prepare.readers.records import NO_CONVERSATION, read_bounded
from data_pipeline.prepare.readers.unnamed_json import begin_of_text, find_records

_BINARY_PROBE_BYTES = 8192
_BINARY = "binary"


def check_text(opened: OpenFile, fields: Fields) -> Skip | None:
    """Return why a file is no text, judged by its beginning; None if it may be one."""
    problem = _find_problem(begin_of_text(opened.stream), opened, fields)
    # That a file is binary is said when it is read.
    if problem is not None and problem.reason == _BINARY:
        return None
    return problem


def may_be_text(opened: OpenFile, fields: Fields) -> bool:
    """Return whether a file is a text by its beginning."""
    return _find_problem(begin_of_text(opened.stream), opened, Fields(text=fields.text)) is None


def read_text(opened: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield the whole file as one document, bytes unchanged: no newline or byte-order-mark is touched."""
    head = begin_of_text(opened.stream)
    problem = _find_problem(head, opened, fields)
    if problem is not None:
        yield problem
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


def _find_problem(head: bytes, opened: OpenFile, fields: Fields) -> Skip | None:
    """Return why a file with this beginning gives no document; None if it may."""
    # git's test for a binary file: a zero byte near the beginning.
    if b"\0" in head[:_BINARY_PROBE_BYTES]:
        return Skip(opened.name, _BINARY)
    records = None
    if not opened.file.format.is_meant:
        records = find_records(head, fields.text, opened.name)
    if records is None and fields.kind != "text":
        return Skip(opened.name, NO_CONVERSATION, "plain text")
    return records
