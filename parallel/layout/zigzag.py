"""The zigzag layout: a part from either end."""

from __future__ import annotations

Pieces = list[tuple[int, int]]
"""First token and number of tokens of each piece, ascending."""


def head_and_tail(num_tokens: int, degree: int) -> list[Pieces]:
    """Cut 2·degree equal parts; each ring rank gets one from either end, and the two in the middle are one piece."""
    part = num_tokens // (2 * degree)
    # Causal work grows with the position, so a part from the front and its mirror image from the end are even work.
    pieces: list[Pieces] = []
    for rank in range(degree - 1):
        head, tail = rank * part, num_tokens - (rank + 1) * part
        pieces.append([(head, part), (tail, part)])
    pieces.append([((degree - 1) * part, 2 * part)])
    return pieces
