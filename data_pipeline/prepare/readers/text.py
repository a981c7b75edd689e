"""Plain text: a file is one document."""

from __future__ import annotations

from collections.abc import Iterator

from data_pipeline.prepare.documents import Document, Item, Skip
from data_pipeline.prepare.readers.opened import OpenFile
from data_pipeline.prepare.readers.records import read_bounded

_BINARY_PROBE_BYTES = 8192


def read_text(opened: OpenFile, text_field: str) -> Iterator[Item]:
    """Yield the whole file as one document, bytes unchanged: no newline or byte-order-mark is touched."""
    head = opened.stream.read(_BINARY_PROBE_BYTES)
    # git's test for a binary file: a zero byte near the beginning.
    if b"\0" in head:
        yield Skip(opened.name, "binary")
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
