"""Scoring rules that compare an output with the references. Each gives 0 to 1.

``contains_all`` and ``contains_any`` are NVIDIA's rules for RULER, for one output: the second for QA, otherwise the
first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

_CONTINUATION = re.compile(r"[\w-]|[.,:]\d")
"""Text that continues the same word or number."""
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_CONTROL = re.compile(r"[\x00-\x1f]")


def starts_with(output: str, references: Sequence[str]) -> float:
    """Return 1 if the output starts with a reference as a full word or number, ignoring spaces and quotation marks.

    A greedily decoded output scores 1 if every target token is the most probable one, so one teacher-forced pass
    measures the same.
    """
    # A model may put an answer in quotation marks; the text inside is the answer.
    written = output.lstrip(" \t\r\n\"'`")
    # A longer number or word with the same start is a different answer.
    for reference in references:
        if written.startswith(reference) and not _CONTINUATION.match(written, len(reference)):
            return 1.0
    return 0.0


def contains_all(output: str, references: Sequence[str]) -> float:
    """Return the share of references that occur in the output, ignoring case."""
    return sum(_contains(output, reference) for reference in references) / len(references)


def contains_any(output: str, references: Sequence[str]) -> float:
    """Return 1 if a reference occurs in the output, ignoring case."""
    return max(_contains(output, reference) for reference in references)


def clean_output(output: str) -> str:
    """Return the output as NVIDIA's scripts score it: control characters become newlines, the ends are stripped."""
    return _CONTROL.sub("\n", output.strip()).strip()


def set_f1(output: str, references: Sequence[str]) -> float:
    """Return F1 for the set listed in the output: harmonic mean of precision and recall; 1 for two empty sets.

    The list is the content of the first pair of brackets, or the first line; commas and spaces separate its items.
    """
    wanted = set(references)
    items = _items(output)
    if not wanted and not items:
        return 1.0
    # Equals 2 · precision · recall / (precision + recall), without its 0 / 0.
    return 2 * len(wanted & items) / (len(wanted) + len(items))


def repeated_after_code(output: str, references: Sequence[str]) -> float:
    """Return MRCR's score: the text's similarity to the wanted one; 0 if the output does not start with the code.

    ``references`` are code and text together, then the code. Similarity is ``difflib.SequenceMatcher.ratio``.
    """
    wanted, code = references
    written = output.lstrip()
    # The code shows that the model answers the last request, instead of just continuing the text.
    if not written.startswith(code):
        return 0.0
    return SequenceMatcher(None, written[len(code) :].strip(), wanted[len(code) :].strip()).ratio()


def _contains(output: str, reference: str) -> float:
    return float(reference.lower() in output.lower())


def _items(output: str) -> set[str]:
    """Return the list items in an output."""
    text = output.strip()
    brackets = _BRACKETS.search(text)
    if brackets:
        text = brackets[1]
    else:
        # A truncated answer has no closing bracket.
        text = text.split("\n", 1)[0].lstrip("[")
    return {item for item in re.split(r"[,\s]+", text) if item}
