"""The zigzag layout: a part from either end."""

from __future__ import annotations

Pieces = list[tuple[int, int]]
"""First token and number of tokens of each piece, ascending."""


def head_and_tail(num_tokens: int, degree: int) -> list[Pieces]:
    """2·degree equal parts, of which each index gets one from either end; the two in the middle adjoin and are one."""
    part = num_tokens // (2 * degree)
    ends = [[(r * part, part), (num_tokens - (r + 1) * part, part)] for r in range(degree - 1)]
    return [*ends, [((degree - 1) * part, 2 * part)]]
