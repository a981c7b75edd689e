"""Rules by which an output is compared with the references. Each gives 0 to 1.

``contains_all`` and ``contains_any`` are NVIDIA's rules for RULER, of one output: of QA the second one, else the first.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher

_CONTINUES = re.compile(r"[\w-]|[.,:]\d")
"""What goes on with the same word or number."""
_BRACKETS = re.compile(r"\[([^\[\]]*)\]")
_CONTROL = re.compile(r"[\x00-\x1f]")


def begins_with(output: str, references: Sequence[str]) -> float:
    """1 if the output begins with a reference as a whole word or number, spaces and quotation marks apart.

    What greedy decoding writes scores 1 where every token of the target is the most likely one, so that one
    teacher-forced pass measures the same.
    """
    # A model may put an answer in quotation marks; what stands inside is what is asked for.
    written = output.lstrip(" \t\r\n\"'`")
    for reference in references:
        if written.startswith(reference) and not _CONTINUES.match(written, len(reference)):
            return 1.0
    return 0.0


def contains_all(output: str, references: Sequence[str]) -> float:
    """The share of references that stand somewhere in the output, whatever their case."""
    return sum(_contains(output, reference) for reference in references) / len(references)


def contains_any(output: str, references: Sequence[str]) -> float:
    """1 if a reference stands somewhere in the output, whatever its case."""
    return max(_contains(output, reference) for reference in references)


def clean_output(output: str) -> str:
    """The output as NVIDIA's scripts score it: control characters are new lines, white space at the ends is gone."""
    return _CONTROL.sub("\n", output.strip()).strip()


def set_f1(output: str, references: Sequence[str]) -> float:
    """F1 of the set that the output lists: harmonic mean of precision and recall.

    The list is what the first pair of brackets holds, or the first line; commas and spaces separate its items. Of two
    empty sets it is 1.
    """
    wanted = set(references)
    listed = _items(output)
    if not wanted and not listed:
        return 1.0
    # The same as 2 · precision · recall / (precision + recall), without their 0 / 0.
    return 2 * len(wanted & listed) / (len(wanted) + len(listed))


def repeated_after_code(output: str, references: Sequence[str]) -> float:
    """MRCR's rule: how similar the text is to the wanted one; 0 for an output that does not begin with the code.

    ``references`` are code and text together, then the code. Similar is ``difflib.SequenceMatcher.ratio``.
    """
    wanted, code = references
    written = output.lstrip()
    # The code shows that the model answers the last request, and does not just go on with the text.
    if not written.startswith(code):
        return 0.0
    return SequenceMatcher(None, written[len(code) :].strip(), wanted[len(code) :].strip()).ratio()


def _contains(output: str, reference: str) -> float:
    return float(reference.lower() in output.lower())


def _items(output: str) -> set[str]:
    """The items of the list that an output gives."""
    text = output.strip()
    brackets = _BRACKETS.search(text)
    if brackets:
        text = brackets[1]
    else:
        # An answer that was cut off has no closing bracket.
        text = text.split("\n", 1)[0].lstrip("[")
    return {item for item in re.split(r"[,\s]+", text) if item}
