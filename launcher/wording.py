"""Wording of counts, durations and long lists in messages, the report and the verbs."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

ONLY_IN_FILE = "only_in_file"
"""Log record attribute: the console leaves the record out."""
ON_TERMINAL = "on_terminal"
"""Log record attribute: the line in the form for a terminal."""


def format_count(count: int, thing: str) -> str:
    """Return the count with its noun: ``1 shard``, ``2 shards``."""
    if count == 1:
        return f"1 {thing}"
    return f"{count:,} {thing}s"


def short_duration(seconds: float) -> str:
    """Format a duration with at most two units: ``45 s``, ``3 min``, ``2 h 05 min``, ``3 d 4 h``."""
    # A duration that rounds up to the next unit is given in that unit: 59.9 s are a minute.
    if seconds < 59.5:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 60:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours} h {minutes:02d} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def first_names(names: Sequence[str], most: int = 8, thing: str = "") -> str:
    """Join at most ``most`` names and count the others: ``a, b and 3 more``, counted in ``thing`` if given."""
    shown = ", ".join(names[:most])
    if len(names) <= most:
        return shown
    return f"{shown} and {len(names) - most} more {thing}".rstrip()


def did_you_mean(word: str, known: Sequence[str], most: int = 3) -> str:
    """Return a question, with a leading space, that suggests the known names closest to ``word``."""
    close = difflib.get_close_matches(word, known, n=most, cutoff=0.5) or sorted(known)
    return f" Did you mean {' or '.join(close[:most])}?"
