"""``Kind``: what ranks send one another."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """What a message holds. Its number is a part of the message's identity, so both sides have the same."""

    KEYS = 1
    KEYS_BETWEEN_NODES = 2
    GRADIENTS = 3
    GRADIENTS_BETWEEN_NODES = 4
    GATHERED_KEYS = 5
    GATHERED_GRADIENTS = 6
    HEADS = 7
    QUERIES = 8
    RESULTS = 9
    CACHED_RESULTS = 10
    STATES = 11
    COUNTS = 12
    TOKENS = 13
    CHOICES = 14
    EXPERT_SUMS = 15
    GATHERED_CHOICES = 16
    REPLICATED_SUMS = 17
    CHUNK_VALUES = 18

    @property
    def words(self) -> str:
        """As a sentence has it."""
        return _WORDS[self]


_WORDS = {
    Kind.KEYS: "keys and values",
    Kind.KEYS_BETWEEN_NODES: "keys and values between nodes",
    Kind.GRADIENTS: "gradients of keys and values",
    Kind.GRADIENTS_BETWEEN_NODES: "gradients of keys and values between nodes",
    Kind.GATHERED_KEYS: "keys and values of all ranks",
    Kind.GATHERED_GRADIENTS: "gradients of the keys and values of all ranks",
    Kind.HEADS: "heads (Ulysses)",
    Kind.QUERIES: "queries",
    Kind.RESULTS: "attention of queries",
    Kind.CACHED_RESULTS: "attention over the keys of a cache",
    Kind.STATES: "states of linear attention",
    Kind.COUNTS: "numbers of tokens for experts",
    Kind.TOKENS: "tokens for experts",
    Kind.CHOICES: "choices of experts",
    Kind.EXPERT_SUMS: "what experts made of tokens",
    Kind.GATHERED_CHOICES: "choices of experts of all ranks",
    Kind.REPLICATED_SUMS: "what experts made of tokens that all ranks have",
    Kind.CHUNK_VALUES: "what was computed of a chunk's tokens",
}
