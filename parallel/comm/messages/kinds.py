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
    GRADIENTS = 3, "gradients of keys and values"
    GRADIENTS_BETWEEN_NODES = 4, "gradients of keys and values between nodes"
    GATHERED_KEYS = 5, "keys and values of all ranks"
    GATHERED_GRADIENTS = 6, "gradients of the keys and values of all ranks"
    HEADS = 7, "heads (Ulysses)"
    QUERIES = 8, "queries"
    RESULTS = 9, "attention of queries"
    CACHED_RESULTS = 10, "attention over the keys of a cache"
    STATES = 11, "states of linear attention"
    COUNTS = 12, "numbers of tokens for experts"
    TOKENS = 13, "tokens for experts"
    CHOICES = 14, "choices of experts"
    EXPERT_SUMS = 15, "what experts made of tokens"
    GATHERED_CHOICES = 16, "choices of experts of all ranks"
    REPLICATED_SUMS = 17, "what experts made of tokens that all ranks have"
    CHUNK_VALUES = 18, "what was computed of a chunk's tokens"
