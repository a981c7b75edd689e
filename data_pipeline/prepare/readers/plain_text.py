"""Plain text: a file is one document, unless it contains JSON records and the user did not request them as text.

Without this check, training would include their braces and escapes. Only the user knows the intent, so a JSON file
without a JSON suffix is skipped, with a hint at the options that select a format. JSON is recognized by the start of
the file: objects in lines, or a first object (also in an array) with the text field or a conversation's fields. A
single object without them counts as text: most often it is a configuration file in a code repository.

Among conversations, plain texts are skipped.
"""

from __future__ import annotations

import codecs
import glob
import json
import re
import shlex
from collections.abc import Iterator
from typing import BinaryIO

from data_pipeline.prepare.readers.open_file import OpenFile
from data_pipeline.prepare.readers.records import NO_CONVERSATION, read_record_bytes
from data_pipeline.prepare.source_items import PAIRS, Document, Fields, Item, Skip
from longctx.chat.conversation import FIELDS, kind_of

JSON_WITHOUT_SUFFIX = "JSON, not named so"

_PROBE_BYTES, _MOST_BYTES = 1 << 13, 1 << 20
"""Bytes read from every file, and from one that may be JSON, whose first record may be long."""
_DECODER = json.JSONDecoder()
_NEXT_LINE = re.compile(r"[ \t]*\r?\n\s*")


def begin_of_text(stream: BinaryIO) -> bytes:
    """Read enough of a text's start to determine whether it is JSON."""
    head = stream.read(_PROBE_BYTES)
    if _first_characters(head) in ("{", "["):
        head += stream.read(_MOST_BYTES - _PROBE_BYTES)
    return head


def find_records(head: bytes, text_field: str, name: str) -> Skip | None:
    """Return a Skip if the file's start ``head`` contains JSON records."""
    if _first_characters(head) not in ("{", "[") or not _contains_records(head, text_field):
        return None
    pattern = shlex.quote(glob.escape(name))
    detail = f"--as-json {pattern} reads its records, --as-text {pattern} the file as it is"
    return Skip(name, JSON_WITHOUT_SUFFIX, detail, is_fault=True)


def _first_characters(head: bytes) -> str:
    """Return the first non-space character, if any."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1].decode("latin-1")


def _contains_records(head: bytes, text_field: str) -> bool:
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace").lstrip()
    is_array = text.startswith("[")
    # Judge an array by its first element.
    text = text.removeprefix("[").lstrip()
    if not text.startswith("{"):
        return False
    first, stop = _object(text, 0)
    if first is None:
        # The first record is longer than the range that was read, so search it for a known field.
        names = [text_field]
        names += [fields[-1] for fields in FIELDS.values()]
        keys = "|".join(re.escape(json.dumps(name)) for name in names)
        return len(head) >= _MOST_BYTES and re.search(f"(?:{keys})\\s*:", text) is not None
    if text_field in first or kind_of(first):
        return True
    newline = _NEXT_LINE.match(text, stop)
    return not is_array and newline is not None and _object(text, newline.end())[0] is not None


def _object(text: str, start: int) -> tuple[dict | None, int]:
    """Parse the JSON object that starts here, if any, and return it with its end."""
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    if isinstance(value, dict):
        return value, stop
    return None, start


_BINARY_PROBE_BYTES = 8192
_BINARY = "binary"


def check_text(source: OpenFile, fields: Fields) -> Skip | None:
    """Check a file's start; return a Skip if it is not text."""
    problem = _find_problem(begin_of_text(source.stream), source, fields)
    # Reading the file reports it if it is binary.
    if problem is not None and problem.reason == _BINARY:
        return None
    return problem


def may_be_text(source: OpenFile, fields: Fields) -> bool:
    """Return whether a file is plain text, judged by its start."""
    return _find_problem(begin_of_text(source.stream), source, Fields(text=fields.text)) is None


def read_text(source: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield the entire file as one document with its bytes unchanged: newlines and byte-order marks are kept."""
    head = begin_of_text(source.stream)
    problem = _find_problem(head, source, fields)
    if problem is not None:
        yield problem
        return
    # A plain file is as large as on disk, but a few compressed kilobytes can expand to terabytes.
    if source.file.format.compression:
        rest = read_record_bytes(source.stream)
    else:
        rest = source.stream.read()
    try:
        yield Document(source.name, (head + rest).decode())
    except UnicodeDecodeError:
        yield Skip(source.name, "not UTF-8")


def _find_problem(head: bytes, source: OpenFile, fields: Fields) -> Skip | None:
    """Return a Skip if a file with this start gives no document."""
    # git's test for a binary file: a zero byte near the start.
    if b"\0" in head[:_BINARY_PROBE_BYTES]:
        return Skip(source.name, _BINARY)
    records = None
    if not source.file.format.is_explicit:
        records = find_records(head, fields.text, source.name)
    if records is None and fields.kind != "text":
        if fields.kind == PAIRS:
            return Skip(source.name, "no pairs", f"plain text{_missing_side(source, fields)}")
        return Skip(source.name, NO_CONVERSATION, "plain text")
    return records


def _missing_side(source: OpenFile, fields: Fields) -> str:
    """Name the other file that would make pairs; return "" if this file's name is not that of a side."""
    compression = source.file.format.compression
    plain = source.name.removesuffix(compression)
    for own, other in ((fields.source, fields.text), (fields.text, fields.source)):
        if plain.endswith(f".{own}"):
            return f", and {plain.removesuffix(own)}{other}{compression} is not read beside it"
    return ""
