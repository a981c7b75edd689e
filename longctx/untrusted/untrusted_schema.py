"""Allowed contents for untrusted files: composable checks, combined per format.

A check takes a value and its path (``tensors.a.shape[0]``) and raises ValueError, one line long, naming both and the
rule. Types are exact: ``true`` is not a number, and ``1.0`` is not an integer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longctx.untrusted.strict_json import shown

Check = Callable[[Any, str], None]

MOST_WHOLE = 2**53
"""Largest integer that every JSON reader parses exactly."""


def anything(value: Any, where: str) -> None:
    """Accept any value from the JSON reader."""


def integer_between(least: int = 0, most: int = MOST_WHOLE) -> Check:
    """Return a check for an integer from ``least`` to ``most``."""

    def check(value: Any, where: str) -> None:
        if type(value) is not int or not least <= value <= most:
            raise ValueError(f"{where}={shown(value)} is not an integer from {least} to {most}")

    return check


def number(value: Any, where: str) -> None:
    """Check for a number, integer or not."""
    if type(value) not in (int, float):
        raise ValueError(f"{where}={shown(value)} is not a number")


def text(pattern: str, description: str) -> Check:
    """Return a check for a string that fully matches the pattern; ``description`` describes it in the message."""
    compiled = re.compile(pattern)

    def check(value: Any, where: str) -> None:
        if type(value) is not str or not compiled.fullmatch(value):
            raise ValueError(f"{where}={shown(value)} is not a {description}")

    return check


def choice_of(words: Sequence[str]) -> Check:
    """Return a check that accepts only these strings."""

    def check(value: Any, where: str) -> None:
        if type(value) is not str or value not in words:
            raise ValueError(f"{where}={shown(value)} is none of {', '.join(words)}")

    return check


def nullable(inner: Check) -> Check:
    """Return a check for ``null``, or a value that ``inner`` accepts."""

    def check(value: Any, where: str) -> None:
        if value is not None:
            inner(value, where)

    return check


def list_of(entry: Check, *, least: int = 0, most: int = MOST_WHOLE) -> Check:
    """Return a check for a list with ``least`` to ``most`` entries."""

    def check(value: Any, where: str) -> None:
        if type(value) is not list:
            raise ValueError(f"{where}={shown(value)} is not a list")
        if not least <= len(value) <= most:
            raise ValueError(f"{where} has {len(value)} entries; expected {least} to {most}")
        for number, inner in enumerate(value):
            entry(inner, f"{where}[{number}]")

    return check


def mapping(key: Check, entry: Check, *, least: int = 0) -> Check:
    """Return a check for an object with at least ``least`` keys, all accepted by ``key``."""

    def check(value: Any, where: str) -> None:
        _check_object(value, where)
        if len(value) < least:
            raise ValueError(f"{where} has {len(value)} entries; expected at least {least}")
        for name, inner in value.items():
            key(name, f"a key of {where}")
            entry(inner, f"{where}.{name}")

    return check


def record(
    required: Mapping[str, Check], optional: Mapping[str, Check] | None = None, *, allow_extra: bool = False
) -> Check:
    """Return a check for an object with these keys; with ``allow_extra``, other keys are ignored."""
    known = dict(required) | dict(optional or {})

    def check(value: Any, where: str) -> None:
        _check_object(value, where)
        missing = [name for name in required if name not in value]
        if missing:
            raise ValueError(f"{where or 'it'} lacks {', '.join(missing)}")
        if not allow_extra and not known.keys() >= value.keys():
            unknown_key = next(name for name in value if name not in known)
            raise ValueError(
                f"{where or 'it'} has the unknown key {shown(unknown_key)}; known keys: {', '.join(known)}"
            )
        for name, inner in known.items():
            if name in value:
                inner(value[name], f"{where}.{name}".removeprefix("."))

    return check


def _check_object(value: Any, where: str) -> None:
    if type(value) is not dict:
        raise ValueError(f"{where or 'it'}={shown(value)} is not an object")


HASH = text(r"[0-9a-f]{32}", "checksum of 32 hex digits")
FILE_NAME = text(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}", "plain file name in this folder")
"""No separator, no parent folder, no hidden file, no character that a terminal interprets."""
NAME = text(
    r"[^\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]{1,400}", "printable name with 1 to 400 characters"
)
