"""``Kind``: the kinds of messages between ranks."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """Content kind. Its number is part of the message identity, so both sides must use the same one."""

    words: str
    """Text for messages to the user."""

    def __new__(cls, number: int, words: str) -> Kind:
        """Create the member with ``number`` as its value, and set its text."""
        kind = int.__new__(cls, number)
        kind._value_, kind.words = number, words
        return kind

    KEYS = 1, "keys and values"
    KEYS_BETWEEN_NODES = 2, "keys and values between nodes"
    GRADIENTS = 3, "KV gradients"
    GRADIENTS_BETWEEN_NODES = 4, "KV gradients between nodes"
    GATHERED_KEYS = 5, "all ranks' keys and values"
    GATHERED_GRADIENTS = 6, "gradients for all ranks' keys and values"
    HEADS = 7, "heads (Ulysses)"
    QUERIES = 8, "queries"
    RESULTS = 9, "attention results"
    CACHED_RESULTS = 10, "attention over cached keys"
    STATES = 11, "linear attention states"
    COUNTS = 12, "expert token counts"
    TOKENS = 13, "tokens for experts"
    CHOICES = 14, "expert choices"
    EXPERT_SUMS = 15, "expert outputs"
    GATHERED_CHOICES = 16, "all ranks' expert choices"
    REPLICATED_SUMS = 17, "expert outputs for replicated tokens"
    CHUNK_VALUES = 18, "a chunk's token values"
    MOVED_TOKENS = 19, "tokens of another placement"
