"""From a JSON value to a document, and how large records may be and files may become: all bounds are here."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, BinaryIO

from data_pipeline.prepare.documents import DamageError, Document, Item, Skip

MAX_RECORD_BYTES = 1 << 30
"""A longer line, array element, CSV line or compressed text is taken for damage, so that none fills the memory."""
FREE_BYTES = 64 << 20
"""What any file may become, however small it is."""
MAX_GROWTH = 4096
"""Times its own size that a file may become beyond that: gzip packs a thousandfold."""
MAX_BLOCK_GROWTH = 64
"""Times its own size that a page or batch of a table may become beyond a record: all of it is in memory at once."""
ITEM_CHARACTERS = 256
"""What a document or skip counts as beside its text, by the time it takes: a table can hold a billion nulls in
kilobytes."""
MOST_VALUES = 4_000_000
"""Values of one record, cells too: parsed, an empty array of three bytes takes 64."""
_MOST_NAMES, _MOST_NAME = 12, 60
_TOKEN = re.compile(r'[,:{\[]|"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
"""What stands before a value in JSON, or a string, also one that is cut."""


def item_of(value: Any, text_field: str, name: str) -> Item:
    """The text in ``text_field`` of a JSON object, or why there is none; a JSON null is left out, as Parquet's is."""
    if not isinstance(value, dict):
        return Skip(name, "not a JSON object", f"it is a {type(value).__name__}", is_fault=True)
    if text_field not in value:
        return no_field(name, text_field, value, (key for key, entry in value.items() if isinstance(entry, str)))
    text = value[text_field]
    if text is None:
        return Skip(name, "null")
    if not isinstance(text, str):
        return Skip(name, f"no text in field {text_field!r}", f"it holds a {type(text).__name__}", is_fault=True)
    return Document(name, text)


def no_field(name: str, text_field: str, fields: Iterable[str], with_text: Iterable[str]) -> Skip:
    """The skip of a file or record without ``text_field``: its detail lists the fields that there are."""
    detail = f"fields: {_listed(fields)}; with text: {_listed(with_text)}"
    return Skip(name, no_field_reason(text_field), detail, is_fault=True)


def no_field_reason(text_field: str) -> str:
    """The reason that ``no_field`` gives."""
    return f"no field {text_field!r}"


def check_length(count: int) -> None:
    """Raise DamageError for a record that is longer than any may be."""
    if count > MAX_RECORD_BYTES:
        raise DamageError(f"a record is longer than {MAX_RECORD_BYTES >> 30} GiB")


def allowance(num_bytes: int) -> int:
    """Return how many bytes or characters so many bytes on disk may become."""
    return FREE_BYTES + MAX_GROWTH * num_bytes


def check_expansion(size: int, num_bytes: int) -> None:
    """Raise DamageError if ``num_bytes`` of a file become ``size`` bytes or characters and may not."""
    if size > allowance(num_bytes):
        raise DamageError(f"{num_bytes:,} bytes of it become more than {allowance(num_bytes):,}")


def check_block(size: int, num_bytes: int) -> None:
    """Raise DamageError if a page or batch of ``num_bytes`` becomes ``size`` bytes and may not."""
    check_expansion(size, num_bytes)
    most = MAX_RECORD_BYTES + MAX_BLOCK_GROWTH * num_bytes
    if size > most:
        raise DamageError(f"{num_bytes:,} bytes of it become more than {most:,} at once")


def check_cells(count: int) -> None:
    """Raise DamageError for a row of so many cells."""
    if count > MOST_VALUES:
        raise DamageError(f"a record has more than {MOST_VALUES:,} values")


def check_values(text: str) -> None:
    """Raise DamageError for JSON of too many values, before they are made of it."""
    # Most records are far from it, and most of what looks like a separator stands in a string.
    if sum(map(text.count, ",:{[")) <= MOST_VALUES:
        return
    count = 0
    for token in _TOKEN.finditer(text):
        count += text[token.start()] != '"'
        check_cells(count)


def read_bounded(stream: BinaryIO) -> bytes:
    """What follows in a stream; DamageError where that is longer than a record may be, and no more is read then."""
    pieces: list[bytes] = []
    left = MAX_RECORD_BYTES + 1
    # To its end: before damage a compressed stream gives less than it is asked for.
    while left and (piece := stream.read(left)):
        pieces.append(piece)
        left -= len(piece)
    check_length(MAX_RECORD_BYTES + 1 - left)
    return b"".join(pieces)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    shown = ", ".join(repr(name[:_MOST_NAME]) for name in names[:_MOST_NAMES])
    if len(names) > _MOST_NAMES:
        return f"{shown} and {len(names) - _MOST_NAMES} more"
    return shown or "none"
