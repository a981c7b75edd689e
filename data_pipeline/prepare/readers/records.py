"""From a JSON value to a document, and how large a single record may be."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, BinaryIO

from data_pipeline.prepare.documents import DamageError, Document, Item, Skip

MAX_RECORD_BYTES = 1 << 30
"""A longer line, array element, CSV line or compressed text is taken for damage, so that none fills the memory."""
MAX_GROWTH = 4096
"""Times its own size that a file may become, beyond such a record: gzip packs a thousandfold."""
_MOST_NAMES = 12


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


def check_expansion(characters: int, file_bytes: int) -> None:
    """Raise DamageError for texts of so many characters from a file that is far too small for them."""
    if characters > MAX_RECORD_BYTES + MAX_GROWTH * file_bytes:
        raise DamageError(f"its {file_bytes:,} bytes become more than {characters:,} characters")


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
    shown = [repr(name) for name in names]
    more = len(shown) - _MOST_NAMES
    if more > 0:
        return f"{', '.join(shown[:_MOST_NAMES])} and {more} more"
    return ", ".join(shown) or "none"
