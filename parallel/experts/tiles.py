"""Default number of tokens that are dispatched to experts at a time."""

from __future__ import annotations

_TILE_TOKENS = 4096
"""Of these each of eight ranks gets enough for full products (two thousand rows an expert of 128 with 8 a token)."""


def default_tile_tokens(device_type: str, degree: int) -> int:
    """Return ``parallel.expert_tile_tokens`` for "auto" and experts over ``degree`` ranks; 0 is all tokens at once.

    One tile leaves the all-to-all exposed. On a CPU messages and products share the cores, and larger products win.
    """
    # If all experts are on this rank, there is no message to wait for.
    if device_type == "cuda" and degree > 1:
        return _TILE_TOKENS
    return 0
