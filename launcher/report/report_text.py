"""Metrics and values as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from statistics import fmean

from launcher.metrics.record import Record


def duration(seconds: float) -> str:
    """Format a duration with at most two units: ``42 s``, ``3 min 20 s``, ``5 h 12 min``, ``2 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    # Round once, before splitting: 59.7 s becomes 1 min 0 s, not 60 s.
    whole = round(seconds)
    for size, unit, smaller_size, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller_size} {smaller}"
    return f"{whole} s"


def perplexity(loss: float) -> str:
    """Format e^loss with four digits; ``inf`` beyond the float range."""
    # math.exp overflows just above 709.
    if loss > 700:
        return "inf"
    return f"{math.exp(loss):.4g}"


def format_number(value: float | None) -> str:
    """Format with four decimals; a dash if unknown."""
    if value is None:
        return "–"
    return f"{value:.4f}"


def mean(values: Iterable[float | None]) -> float | None:
    """Return the mean over finite values; None if there are no such values."""
    # One diverged step must not turn the mean into NaN.
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return None
    return fmean(known)


def known(records: Sequence[Record], key: str) -> list[float]:
    """Return a key's finite values, so that one broken step does not hide the others' metrics."""
    values = (record.get(key) for record in records)
    return [value for value in values if value is not None and math.isfinite(value)]
