"""Regular expressions in an untrusted tokenizer.json: their shortest match, and their running time.

The library matches by backtracking. ``(a+)+$`` tries 2ⁿ ways for n consecutive letters: the library panics after ten
million, in a tenth of a second. Three stars in a row take n³ steps and never panic. So patterns slower than quadratic
are found by running them once, at load time.
"""

from __future__ import annotations

import re
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from longctx.errors import DataError

_RUN_CHARACTERS = (32, 64, 128, 256, 512, 1024)
"""Lengths of the repetition to try: each costs a few times as much as the previous one, and no more."""
_MOST_SECONDS = 1.0
"""CPU time limit per text, valid on machines ten times slower too.

Published expressions take half a thousandth of it, and quadratic ones a hundredth.
"""
_MOST_LETTERS = 8
_TAIL = "\x01"
"""Character after the repeated ones, which prevents a match over all of them."""


def shortest_match(pattern: str) -> int:
    """Return the minimum characters that a pattern matches; 0 if unknown."""
    try:
        with warnings.catch_warnings(action="ignore"):
            parsed = re._parser.parse(pattern)  # type: ignore[attr-defined]
        return parsed.getwidth()[0]
    # Python's dialect differs from the library's: it may not support the pattern.
    except (re.error, RecursionError, OverflowError, ValueError):
        return 0


def check_patterns(fast: tokenizers.Tokenizer, content: dict[str, Any], path: Path) -> None:
    """Raise DataError for regular expressions slower than quadratic in the text length."""
    normalizer: Any = fast.normalizer
    pre_tokenizer: Any = fast.pre_tokenizer
    decoder: Any = fast.decoder
    actions: dict[str, Callable[[str], object]] = {
        "normalizer": lambda text: normalizer.normalize_str(text),
        "pre_tokenizer": lambda text: pre_tokenizer.pre_tokenize_str(text),
        "decoder": lambda text: decoder.decode([text]),
    }
    # One section of tokenizer.json at a time, so that the error names it.
    for part, action in actions.items():
        patterns = list(_patterns(content.get(part)))
        if patterns:
            for unit in _units(patterns):
                _try(action, unit, part, path)


def _try(action: Callable[[str], object], unit: str, part: str, path: Path) -> None:
    """Raise DataError if repetitions of ``unit`` take too long."""
    for length in _RUN_CHARACTERS:
        # Backtracking is worst when a long repetition almost matches.
        text = (unit * length)[:length] + _TAIL
        # Time in this thread only: others may use the processor.
        begin = time.thread_time()
        action(text)
        seconds = time.thread_time() - begin
        if seconds > _MOST_SECONDS:
            raise DataError(
                f"tokenizer={path}: a regular expression in its {part} takes {seconds:.2g} s for {length} characters "
                f"({unit[:_MOST_LETTERS]!r} repeated). Take the tokenizer from its publisher."
            )


def _units(patterns: list[str]) -> list[str]:
    """Return the texts to repeat: a few character classes, and letters that occur in the patterns."""
    letters = list(dict.fromkeys(c for pattern in patterns for c in pattern if c.isalnum()))[:_MOST_LETTERS]
    return list(dict.fromkeys([" ", "\n", "a", "1", "".join(letters) or "a", *letters]))


def _patterns(part: Any, depth: int = 0) -> Iterator[str]:
    """Yield a section's regular expressions."""
    if isinstance(part, dict) and depth < 200:
        for name, inner in part.items():
            if name == "Regex" and isinstance(inner, str):
                yield inner
            else:
                yield from _patterns(inner, depth + 1)
    elif isinstance(part, list) and depth < 200:
        for inner in part:
            yield from _patterns(inner, depth + 1)
