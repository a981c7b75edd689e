"""Read untrusted input: files of bounded size, and JSON that means the same to every reader.

Nothing here depends on the purpose of a file: ``schema`` defines allowed contents.
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

from longctx.untrusted.git_lfs import ADVICE, is_pointer

MOST_JSON_BYTES = 64 * 2**20
"""The largest JSON file that is read, unless its format needs more."""
MOST_JSON_VALUES = 4_000_000
"""The most values in one: parsed, each takes some 50 to 100 bytes of memory, whatever it takes in the file."""
MOST_DEPTH = 64
"""The deepest nesting. Python's own readers and writers of JSON recurse."""
_MOST_DIGITS = 40
"""Digits of the longest whole number: 128 bits are 39. Beyond, Python computes where others overflow."""

_HEAD = 64
NOT_FETCHED = f"is a Git LFS pointer, and the file was not fetched: {ADVICE}"

_SHOWN = reprlib.Repr()
_SHOWN.maxlevel, _SHOWN.maxlist, _SHOWN.maxtuple, _SHOWN.maxdict, _SHOWN.maxset = 3, 12, 12, 12, 12
_SHOWN.maxstring, _SHOWN.maxother, _SHOWN.maxlong = 80, 60, 48

_HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")


class NotFetchedError(ValueError):
    """Error for a Git LFS pointer in place of the file."""


def read_bounded(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a plain file.

    Raise ValueError if it is too large, not a plain file, or a Git LFS pointer, and OSError if it cannot be read.
    """
    with _opened(path) as file:
        state = os.fstat(file.fileno())
        if stat.S_ISDIR(state.st_mode):
            raise IsADirectoryError(None, "it is a folder", str(path))
        if not stat.S_ISREG(state.st_mode):
            raise ValueError("it is no plain file")
        if state.st_size > most_bytes:
            raise ValueError(f"it has {state.st_size:,} bytes, and such a file has at most {most_bytes:,}")
        # The size is that of the file system, which for some endless files is 0.
        content = file.read(most_bytes + 1)
        if len(content) > most_bytes:
            raise ValueError(f"it has more than {most_bytes:,} bytes")
        if is_pointer(content[:_HEAD]):
            raise NotFetchedError(f"it {NOT_FETCHED}")
        return content


def check_fetched(path: Path) -> None:
    """Raise NotFetchedError for a Git LFS pointer; raise OSError if the file cannot be read."""
    with _opened(path) as file:
        if stat.S_ISREG(os.fstat(file.fileno()).st_mode) and is_pointer(file.read(_HEAD)):
            raise NotFetchedError(f"it {NOT_FETCHED}")


def _opened(path: Path) -> BinaryIO:
    """Open a file without blocking: opening a pipe without a writer would hang."""
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")


def read_json(path: Path, *, most_bytes: int = MOST_JSON_BYTES, most_values: int = MOST_JSON_VALUES) -> Any:
    """Return the value of a JSON file, read strictly by ``parse_json``; raise OSError if it cannot be read."""
    return parse_json(read_bounded(path, most_bytes), most_values=most_values)


def parse_json(content: bytes, *, most_values: int = MOST_JSON_VALUES) -> Any:
    """Return the value of a JSON text in UTF-8; raise ValueError, one line long, if JSON readers disagree on it.

    They disagree on a key given twice, NaN, Infinity, a number beyond a float's range or with too many digits, and half
    of a surrogate pair. Expensive texts are refused too: more than ``most_values`` values, or nesting beyond
    ``MOST_DEPTH``.
    """
    text = content.decode()
    # Before anything is built. Commas within texts count too, which is harmless.
    values = 1 + content.count(b",") + content.count(b"[") + content.count(b"{")
    if values > most_values:
        raise ValueError(f"it has some {values:,} values, and such a file has at most {most_values:,}")
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
    """Return a value for a message, cut to a few words, for any untrusted value."""
    return _SHOWN.repr(value)


def printable(text: str) -> str:
    """Return an untrusted name for a message: unchanged if it is printable, otherwise quoted; cut to a few words."""
    if text.isprintable() and text == text.strip() and len(text) <= _SHOWN.maxstring:
        return text
    return shown(text)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json takes the last of two: a file could then mean one thing to us and another to a stricter reader.
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"it names {shown(twice)} twice in one object")
    return found


def _refuse_constant(word: str) -> float:
    raise ValueError(f"it has {word}, which is no number in JSON")


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"it has a whole number of {len(digits):,} digits, and {_MOST_DIGITS} are the most")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"it has the number {shown(digits)}, which is beyond a float's range")
    return number


def _check_depth(value: Any) -> None:
    """Raise ValueError for containers nested beyond ``MOST_DEPTH``."""
    # Level by level instead of by recursion, which too much depth would break.
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
    """Raise ValueError for a text that UTF-8 cannot represent: every later message or path with it would fail."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError("it has half of a surrogate pair, which is no character") from error
