"""``longest_row``: the longest row that fits."""

from __future__ import annotations

from collections.abc import Callable


def longest_row(fits: Callable[[int], bool], unit: int) -> int:
    """The longest row, in multiples of ``unit`` tokens, that ``fits``; 0 where not even one unit does."""
    if not fits(unit):
        return 0
    low = 1
    while fits(2 * low * unit):
        low *= 2
        if low * unit > 1 << 40:
            break
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        if fits(middle * unit):
            low = middle
        else:
            high = middle
    return low * unit
