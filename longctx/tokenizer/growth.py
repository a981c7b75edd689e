"""How much a stranger's ``tokenizer.json`` may make of a text, and its faults as errors of ours.

A normalizer that replaces each letter by a megabyte, or ten of them that each double what the one before has made, fill
the memory with the first line of text. The library runs them within one call, so what they can come to is computed from
the file, before anything is encoded.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longctx.errors import DataError

MOST_GROWTH = 256
"""The most characters that a normalizer or decoder may make of one."""
_MOST_STEPS = 256
"""Steps of a normalizer or decoder. Those of published tokenizers have at most ten."""


def check_growth(content: dict[str, Any], path: Path) -> None:
    """Raise DataError for a tokenizer.json whose normalizer or decoder may multiply a text by more than it may."""
    for part, list_name in (("normalizer", "normalizers"), ("decoder", "decoders")):
        steps = list(_steps(content.get(part), list_name))
        growth = 1.0
        for step in steps[:_MOST_STEPS]:
            growth *= _growth(step)
        if len(steps) > _MOST_STEPS or growth > MOST_GROWTH:
            raise DataError(
                f"tokenizer={path}: its {part} may make {growth:.3g} characters of one in {len(steps)} steps, and at "
                f"most {MOST_GROWTH} in {_MOST_STEPS} are run. Take the tokenizer from its publisher."
            )


@contextmanager
def library_faults(path: Path) -> Iterator[None]:
    """Turn what the library ``tokenizers`` panics with, such as a regular expression without end, into a DataError."""
    try:
        yield
    except BaseException as error:
        # pyo3's class is none of Exception's, and none that can be imported.
        if type(error).__name__ != "PanicException":
            raise
        reason = str(error).splitlines()[0][:200] if str(error) else "it panics"
        raise DataError(
            f"tokenizer={path} cannot be used: `tokenizers` fails on it: {reason}. Take it from its publisher."
        ) from None


def _steps(step: Any, list_name: str, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The steps of a part, those of sequences within sequences too."""
    if not isinstance(step, dict) or depth > _MOST_STEPS:
        return
    inner = step.get(list_name)
    if step.get("type") == "Sequence" and isinstance(inner, list):
        for one in inner:
            yield from _steps(one, list_name, depth + 1)
    else:
        yield step


def _growth(step: dict[str, Any]) -> float:
    """The most characters that a step makes of one; 1 for those of Unicode, which no number of them multiplies."""
    kind = step.get("type")
    if kind == "Replace":
        made, pattern = len(str(step.get("content", ""))), step.get("pattern")
        least = 0
        if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
            least = len(pattern["String"])
        # Of a regular expression nobody knows the shortest match: an empty one stands before every character.
        return max(1.0, made / least) if least else max(1.0, float(made))
    if kind == "Prepend":
        return max(1.0, float(len(str(step.get("prepend", "")))))
    if kind == "Precompiled":
        return max(1.0, float(_longest(step.get("precompiled_charsmap"))))
    return 1.0


def _longest(charsmap: Any) -> int:
    """Bytes of the longest text that a map of characters has for one: texts end in a zero, behind a table."""
    try:
        data = base64.b64decode(str(charsmap or ""))
    except (binascii.Error, ValueError):
        return 0
    begin = 4 + int.from_bytes(data[:4], "little")
    return max((len(text) for text in data[begin:].split(b"\0")), default=0)
