"""Default tile size for expert dispatch."""

from __future__ import annotations

_TILE_TOKENS = 4096
"""With this many tokens, each of eight ranks gets enough for efficient matmuls (2,000 rows per expert for 128 experts,
8 per token)."""


def default_tile_tokens(device_type: str, degree: int) -> int:
    """Return ``parallel.expert_tile_tokens`` for "auto" and ``degree`` expert ranks; 0 means all tokens at once.

    A single tile leaves the all-to-all exposed. On a CPU, communication and matmuls share the cores, and larger matmuls
    win.
    """
    # With all experts on this rank, there is no communication to overlap.
    if device_type == "cuda" and degree > 1:
        return _TILE_TOKENS
    return 0
