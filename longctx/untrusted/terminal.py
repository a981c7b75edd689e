"""Untrusted text on a terminal: escape characters that the terminal would interpret."""

from __future__ import annotations

import re
from typing import TextIO

# control characters except tab and line feed, and those that change text direction
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def for_terminal(text: str, stream: TextIO) -> str:
    r"""Return ``text`` unchanged, or escaped if ``stream`` is a terminal.

    File names, document names and documents are untrusted. On a terminal an escape sequence could move the cursor,
    change displayed text, or answer as if the user had typed; so it is escaped, as ``\x1b[2J``.
    """
    if not stream.isatty():
        return text
    return escape_control_characters(text)


def escape_control_characters(text: str) -> str:
    """Replace every character that a terminal interprets by Python's escaped form."""
    return _ACTS.sub(lambda found: ascii(found[0])[1:-1], text)
