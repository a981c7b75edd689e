"""Read untrusted input: files with bounded size, and JSON that every reader interprets in the same way.

Nothing here depends on a file's purpose: ``schema`` defines allowed contents.
"""

from __future__ import annotations

import json
import math
import os
import re
import reprlib
import stat
from collections import Counter
from pathlib import Path
from typing import Any, BinaryIO

from longctx.untrusted.git_lfs import FETCH_HINT, is_pointer

MOST_JSON_BYTES = 64 * 2**20
"""Maximum JSON file size, unless its format needs more."""
MOST_JSON_VALUES = 4_000_000
"""Maximum values in one file: once parsed, each takes some 50 to 100 bytes in memory, whatever it takes in the file."""
MOST_DEPTH = 64
"""Maximum nesting. Python's own JSON readers and writers recurse."""
_MAX_INT_LENGTH = 40
"""Digits in the longest integer: 128 bits are 39. Beyond that, Python computes on but other languages overflow."""

_HEAD = 64
NOT_FETCHED = f"is a Git LFS pointer, and the file was not fetched: {FETCH_HINT}"

_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxtuple, _SHOWN.maxdict, _SHOWN.maxset = 3, 12, 12, 12, 12
_SHOWN.maxstring, _SHOWN.maxother, _SHOWN.maxlong = 80, 60, 48

_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")


class NotFetchedError(ValueError):
    """Raised for a Git LFS pointer in place of the file."""


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Read a plain file.

    Raise ValueError if it is too large, not a plain file, or a Git LFS pointer, and OSError if it cannot be read.
    """
    with _open_nonblocking(path) as file:
        state = os.fstat(file.fileno())
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(None, "it is a folder", str(path))
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is not a plain file")
        if state.st_size > most_bytes:
            raise ValueError(f"it has {state.st_size:,} bytes; the limit is {most_bytes:,}")
        # the reported size is 0 for some endless files
        content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"it has more than {most_bytes:,} bytes")
        if is_pointer(content[:_HEAD]):
            raise NotFetchedError(f"it {NOT_FETCHED}")
        return content


def check_fetched(path: Path) -> None:
    """Raise NotFetchedError for a Git LFS pointer, and OSError if the file cannot be read."""
    with _open_nonblocking(path) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and is_pointer(file.read(_HEAD)):
            raise NotFetchedError(f"it {NOT_FETCHED}")


def _open_nonblocking(path: Path) -> BinaryIO:
    """Open a file without blocking: opening a pipe without a writer would hang."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def read_json(path: Path, *, most_bytes: int = MOST_JSON_BYTES, most_values: int = MOST_JSON_VALUES) -> Any:
    """Read a JSON file strictly with ``parse_json``; raise OSError if it cannot be read."""
    return parse_json(read_bounded(path, most_bytes), most_values=most_values)


def parse_json(content: bytes, *, most_values: int = MOST_JSON_VALUES) -> Any:
    """Parse UTF-8 JSON; raise ValueError, one line long, if JSON readers would disagree on it.

    They disagree on duplicate keys, NaN, Infinity, numbers beyond a float's range or with too many digits, and unpaired
    surrogates. Expensive texts are rejected too: more than ``most_values`` values, or nesting beyond ``MOST_DEPTH``.
    """
    text = content.decode()
    # before building any object; commas within strings count too, which is harmless
    values = 1 + content.count(b",") + content.count(b"[") + content.count(b"{")
    if values > most_values:
        raise ValueError(f"it has some {values:,} values; the limit is {most_values:,}")
    try:
        parsed = json.loads(
            text,
            object_pairs_hook=_unique,
            parse_constant=_refuse_constant,
            parse_int=_whole,
            parse_float=_finite,
        )
    except RecursionError as error:
        raise ValueError(f"it nests values more than {MOST_DEPTH} deep") from error
    _check_depth(parsed)
    if _HALF_CHARACTER.search(content):
        _check_characters(parsed)
    return parsed


def shown(value: Any) -> str:
    """Format any untrusted value for a message, truncated to a few words."""
    return _SHOWN.repr(value)


def printable(text: str) -> str:
    """Format an untrusted name for a message: unchanged if printable, otherwise quoted; truncated to a few words."""
    if text.isprintable() and text == text.strip() and len(text) <= _SHOWN.maxstring:
        return text
    return shown(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json keeps a duplicate key's last value; a stricter reader could see different content
    found = dict(pairs)
    if len(found) < len(pairs):
        [(duplicate, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it has the key {shown(duplicate)} twice in one object")
    return found


def _refuse_constant(word: str) -> float:
    raise ValueError(f"it has {word}, which is not a JSON number")


def _whole(token_text: str) -> int:
    if len(token_text) > _MAX_INT_LENGTH:
        raise ValueError(f"it has an integer with {len(token_text):,} digits; the limit is {_MAX_INT_LENGTH}")
    return int(token_text)


def _finite(token_text: str) -> float:
    number = float(token_text)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {shown(token_text)}, which is beyond a float's range")
    return number


def _check_depth(value: Any) -> None:
    """Raise ValueError for containers nested beyond ``MOST_DEPTH``."""
    # level by level, because recursion would overflow at excessive depth
    level = [value]
    for _ in range(MOST_DEPTH):
        inner: list[Any] = []
        for container in level:
            entries = container
            if isinstance(container, dict):
                entries = container.values()
            inner += [entry for entry in entries if isinstance(entry, dict | list)]
        if not inner:
            return
        level = inner
    raise ValueError(f"it nests values more than {MOST_DEPTH} deep")


def _check_characters(value: Any) -> None:
    """Raise ValueError for a string that UTF-8 cannot encode: every later message or path with it would fail."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has an unpaired surrogate, which is not a character") from error
