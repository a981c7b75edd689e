"""Records of JSON in a file whose ending does not say so: as text their braces and escapes would be trained on.

Nobody but the user knows what is meant, so such a file is left out with the options that say it. It is known by its
beginning: objects in lines, or a first object with the text field or with those of a conversation, also that of an
array. A single object without them is taken for what it most often is, a setting or a map among the files of a program.
"""

from __future__ import annotations

import codecs
import glob
import json
import re
import shlex
from typing import BinaryIO

from data_pipeline.prepare.documents import Skip
from longctx.chat.conversation import FIELDS, kind_of

REASON = "JSON, not named so"

_PROBE_BYTES, _MOST_BYTES = 1 << 13, 1 << 20
"""Read of every file; and of one that may be JSON, whose first record may be long."""
_DECODER = json.JSONDecoder()
_NEXT_LINE = re.compile(r"[ \t]*\r?\n\s*")


def begin_of_text(stream: BinaryIO) -> bytes:
    """Return as much of a text as shows whether it is JSON."""
    head = stream.read(_PROBE_BYTES)
    if _first_characters(head) in ("{", "["):
        head += stream.read(_MOST_BYTES - _PROBE_BYTES)
    return head


def find_records(head: bytes, text_field: str, name: str) -> Skip | None:
    """Return the skip of a file with this beginning that holds records of JSON; None for any other text."""
    if _first_characters(head) not in ("{", "[") or not _holds_records(head, text_field):
        return None
    pattern = shlex.quote(glob.escape(name))
    detail = f"--as-json {pattern} reads its records, --as-text {pattern} the file as it is"
    return Skip(name, REASON, detail, is_fault=True)


def _first_characters(head: bytes) -> str:
    """Return the first character that is no space; empty if there is none."""
    return head.removeprefix(codecs.BOM_UTF8).lstrip()[:1].decode("latin-1")


def _holds_records(head: bytes, text_field: str) -> bool:
    text = head.removeprefix(codecs.BOM_UTF8).decode("utf-8", "replace").lstrip()
    is_array = text.startswith("[")
    # Of an array its first element.
    text = text.removeprefix("[").lstrip()
    if not text.startswith("{"):
        return False
    first, stop = _object(text, 0)
    if first is None:
        # The first record is longer than what was read.
        names = [text_field]
        names += [fields[-1] for fields in FIELDS.values()]
        keys = "|".join(re.escape(json.dumps(name)) for name in names)
        return len(head) >= _MOST_BYTES and re.search(f"(?:{keys})\\s*:", text) is not None
    if text_field in first or kind_of(first):
        return True
    newline = _NEXT_LINE.match(text, stop)
    return not is_array and newline is not None and _object(text, newline.end())[0] is not None


def _object(text: str, start: int) -> tuple[dict | None, int]:
    """Return the JSON object that begins here and where it ends; None if there is none."""
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except (ValueError, RecursionError):
        return None, start
    if isinstance(value, dict):
        return value, stop
    return None, start
