"""Text of strangers on a terminal: what the terminal would act on is spelt."""

from __future__ import annotations

import re
from typing import TextIO

# Control characters but tab and line feed, and those that turn the direction of the text behind them.
_ACTS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")


def for_terminal(text: str, stream: TextIO) -> str:
    r"""Return ``text`` as it is to be written to ``stream``: as it is, unless that is a terminal.

    Names of files and documents, and documents themselves, come from strangers. On a terminal an escape sequence in one
    could move the cursor, change what stands there, or answer as if the user had typed; so it is spelt, ``\x1b[2J``.
    """
    if not stream.isatty():
        return text
    return spelled(text)


def spelled(text: str) -> str:
    """Return ``text`` with every character that a terminal acts on in Python's spelling."""
    return _ACTS.sub(lambda found: ascii(found[0])[1:-1], text)
