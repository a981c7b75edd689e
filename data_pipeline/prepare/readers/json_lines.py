"""JSON Lines: a line is one document."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

from data_pipeline.prepare.documents import DamageError, Fields, Item, Skip
from data_pipeline.prepare.readers.opened import OpenFile
from data_pipeline.prepare.readers.records import Record, check_length, check_values, items_of

_PIECE_BYTES = 1 << 20


def read_lines(opened: OpenFile, fields: Fields) -> Iterator[Item]:
    """Yield the document of each line's object."""
    yield from items_of(records_in_lines(opened), fields)


def records_in_lines(opened: OpenFile, begun: bytes = b"") -> Iterator[Record | Skip]:
    """Yield the value of each line, or why there is none; blank lines are ignored.

    ``begun`` is what was already read of the stream.
    """
    for number, line in enumerate(_lines(opened.stream, begun), start=opened.piece.first + 1):
        if line.strip():
            yield _record(line, f"{opened.name}:{number}")


def _lines(stream: BinaryIO, begun: bytes) -> Iterator[bytes]:
    """Yield lines without their newline; only ``\\n`` ends one, as JSON Lines has it."""
    # Not the stream's own lines: they also end at \r and at Unicode's line separators.
    # A long line comes in many pieces, which are joined once.
    unfinished: list[bytes] = []
    length = 0
    piece = begun or stream.read(_PIECE_BYTES)
    while piece:
        head, *lines = piece.split(b"\n")
        unfinished.append(head)
        length += len(head)
        check_length(length)
        if lines:
            yield b"".join(unfinished)
            rest = lines.pop()
            yield from lines
            unfinished, length = [rest], len(rest)
        piece = stream.read(_PIECE_BYTES)
    if length:
        yield b"".join(unfinished)


def _record(line: bytes, name: str) -> Record | Skip:
    """The value of one line."""
    # utf-8-sig: the first line may begin with a byte-order mark.
    try:
        text = line.decode("utf-8-sig")
        check_values(text)
        value = json.loads(text)
    except UnicodeDecodeError as error:
        return Skip(name, "not UTF-8", str(error), is_fault=True)
    except (ValueError, RecursionError, DamageError) as error:
        return Skip(name, "not JSON", str(error), is_fault=True)
    return Record(name, value)
