"""Conversion from records to documents, and all size limits on records and on expanded files."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

from data_pipeline.prepare.source_items import PAIRS, Document, Fields, FileContentError, Item, Skip
from longctx.chat.conversation import NoConversationError, conversation_of, conversation_text
from longctx.chat.preference import INVALID_LABEL, PREFERENCE_FIELDS, NoPreferenceError, preference_of

# Limits against decompression bombs and damaged lengths: sources may come from anywhere, and one bad file must not
# exhaust a builder's memory.
MAX_RECORD_BYTES = 1 << 30
"""A longer line, array element, CSV row or compressed text is treated as damage, so that it cannot fill the memory."""
FREE_BYTES = 64 << 20
"""Expanded size allowed for any file, however small."""
MAX_GROWTH = 4096
"""Expansion factor allowed beyond that: gzip can compress a thousandfold."""
MAX_BLOCK_GROWTH = 64
"""Expansion factor allowed for a table page or batch beyond one record: all of it is in memory at once."""
ITEM_CHARACTERS = 256
"""Characters counted per document or skip in addition to its text, in proportion to the time it takes: a table can
contain a billion nulls in kilobytes."""
MOST_VALUES = 4_000_000
"""Maximum values per record, including cells: a parsed empty array takes 64 bytes for its three bytes of text."""
_MOST_NAMES, _MOST_NAME = 12, 60
_TOKEN = re.compile(r'[,:{\[]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""A token that precedes a JSON value, or a string, possibly truncated."""


EMPTY_SIDE = "a side is empty"
"""Reason for a pair without a source or a target."""
NO_CONVERSATION = "no conversation"
"""Reason for a record or file that is read as conversations but contains none."""


class Record(NamedTuple):
    """A value in a file, and its document's name."""

    name: str
    value: Any


def items_of(entries: Iterable[Record | Skip], fields: Fields) -> Iterator[Item]:
    """Convert each record to a document, or to a Skip with the reason."""
    for entry in entries:
        if isinstance(entry, Skip):
            yield entry
        else:
            yield item_of(entry, fields)


def item_of(record: Record, fields: Fields) -> Item:
    """Convert a JSON object to a document, or to a Skip with the reason; a JSON null is skipped like a Parquet null."""
    name, value = record
    if not isinstance(value, dict):
        return Skip(name, "not a JSON object", f"it is a {type(value).__name__}", is_fault=True)
    missing = find_missing(fields, value)
    if missing:
        return no_field(name, missing, value, (key for key, entry in value.items() if isinstance(entry, str)))
    if all(value[field] is None for field in fields.names):
        return Skip(name, "null")
    if fields.kind == PAIRS:
        return _pair(name, value, fields)
    if fields.kind != "text":
        return _conversation(name, value, fields.kind)
    text = value[fields.text]
    if not isinstance(text, str):
        return Skip(name, f"no text in field {fields.text!r}", f"it holds a {type(text).__name__}", is_fault=True)
    return Document(name, text)


def _pair(name: str, value: dict[str, Any], fields: Fields) -> Item:
    """Convert a record with two texts."""
    texts = []
    for field in fields.names:
        text = value[field]
        if isinstance(text, bytes):
            try:
                text = text.decode()
            except UnicodeDecodeError as error:
                return Skip(name, "not UTF-8", str(error), is_fault=True)
        if text is not None and not isinstance(text, str):
            return Skip(name, f"no text in field {field!r}", f"it holds a {type(text).__name__}", is_fault=True)
        # An empty side makes no pair.
        if not text or not text.strip():
            return Skip(name, EMPTY_SIDE, f"{field!r} is empty")
        texts.append(text)
    source, target = texts
    # The joined text only serves duplicate detection and length bounds.
    return Document(name, f"{source}\n{target}", pair=(source, target))


def _conversation(name: str, value: dict[str, Any], kind: str) -> Item:
    """Convert a record with a conversation's or preference's fields."""
    try:
        if kind in PREFERENCE_FIELDS:
            preference = preference_of(value, kind)
            return Document(name, preference.text, preference=preference)
        conversation = conversation_of(value, kind)
        return Document(name, conversation_text(conversation), conversation)
    except NoPreferenceError as error:
        return Skip(name, error.reason, error.detail, is_fault=error.reason == INVALID_LABEL)
    except NoConversationError as error:
        where = ""
        if error.turn >= 0:
            where = f"message {error.turn}: "
        return Skip(name, NO_CONVERSATION, f"{where}{error}", is_fault=True)
    except (TypeError, RecursionError) as error:
        return no_json(name, error)


def no_json(name: str, error: Exception) -> Skip:
    """Return the skip for a conversation that JSON cannot represent: tables may contain dates, bytes and infinities."""
    detail = str(error)
    if isinstance(error, RecursionError):
        detail = "it nests values too deep"
    return Skip(name, NO_CONVERSATION, detail, is_fault=True)


def find_missing(fields: Fields, names: Collection[str]) -> str:
    """Return the first required field missing from ``names``; empty if all are present."""
    return next((field for field in fields.names if field not in names), "")


def no_field(name: str, field: str, fields: Iterable[str], with_text: Iterable[str]) -> Skip:
    """Return the skip for a file or record without a required field; its detail lists the existing fields."""
    detail = f"fields: {_format_names(fields)}; with text: {_format_names(with_text)}"
    return Skip(name, no_field_reason(field), detail, is_fault=True)


def no_field_reason(field: str) -> str:
    """Return the reason that ``no_field`` gives."""
    return f"no field {field!r}"


def check_length(count: int) -> None:
    """Raise FileContentError if a record exceeds the maximum length."""
    if count > MAX_RECORD_BYTES:
        raise FileContentError(f"a record is longer than {MAX_RECORD_BYTES >> 30} GiB")


def allowance(num_bytes: int) -> int:
    """Return the number of bytes or characters to which ``num_bytes`` on disk may expand."""
    return FREE_BYTES + MAX_GROWTH * num_bytes


def check_expansion(size: int, num_bytes: int) -> None:
    """Raise FileContentError if ``size``, the bytes or characters expanded from ``num_bytes`` on disk, is too large."""
    if size > allowance(num_bytes):
        raise FileContentError(f"{num_bytes:,} bytes of it become more than {allowance(num_bytes):,}")


def check_block(size: int, num_bytes: int) -> None:
    """Raise FileContentError if ``size``, the bytes expanded from a page or batch with ``num_bytes``, is too large."""
    check_expansion(size, num_bytes)
    most = MAX_RECORD_BYTES + MAX_BLOCK_GROWTH * num_bytes
    if size > most:
        raise FileContentError(f"{num_bytes:,} bytes of it become more than {most:,} at once")


def check_cells(count: int) -> None:
    """Raise FileContentError if a row has too many cells."""
    if count > MOST_VALUES:
        raise FileContentError(f"a record has more than {MOST_VALUES:,} values")


def check_values(text: str) -> None:
    """Raise FileContentError if JSON has too many values, before they are created."""
    # Fast path: most records are far below the limit even if separators inside strings are counted.
    if sum(map(text.count, ",:{[")) <= MOST_VALUES:
        return
    count = 0
    for token in _TOKEN.finditer(text):
        count += text[token.start()] != '"'
        check_cells(count)


def read_record_bytes(stream: BinaryIO) -> bytes:
    """Return the rest of a stream; raise FileContentError, without reading on, if it exceeds the record limit."""
    pieces: list[bytes] = []
    left = MAX_RECORD_BYTES + 1
    # Loop to the end: before damage a compressed stream returns less than requested.
    while left and (piece := stream.read(left)):
        pieces.append(piece)
        left -= len(piece)
    check_length(MAX_RECORD_BYTES + 1 - left)
    return b"".join(pieces)


def _format_names(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(repr(name[:_MOST_NAME]) for name in names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        return f"{shown} and {len(names) - _MOST_NAMES} more"
    return shown or "none"
