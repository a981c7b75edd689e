"""The zigzag layout: one part from either end per rank."""

from __future__ import annotations

Pieces = list[tuple[int, int]]
"""First token and token count per run, ascending."""


def head_and_tail(num_tokens: int, degree: int) -> list[Pieces]:
    """Cut 2·degree equal parts and pair the r-th from either end; the middle two form one run."""
    part = num_tokens // (2 * degree)
    # Causal work grows linearly with the position, so a part from the front and its mirror image from the end sum to
    # the same work on every rank.
    pieces: list[Pieces] = []
    for rank in range(degree - 1):
        head, tail = rank * part, num_tokens - (rank + 1) * part
        pieces.append([(head, part), (tail, part)])
    pieces.append([((degree - 1) * part, 2 * part)])
    return pieces
