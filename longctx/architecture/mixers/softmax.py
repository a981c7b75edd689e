"""Softmax attention with grouped queries: K = H is multi-head, K = 1 multi-query attention.

Axes: M model width, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.mixer import Cached, Mixer, norm_size


@dataclass(frozen=True)
class Softmax(Mixer):
    """Queries weigh the values of the keys that they see by the softmax of their scores."""

    name: ClassVar[str] = "softmax"
    core: ClassVar[str] = "softmax"
    has_scores: ClassVar[bool] = True

    @property
    def reach(self) -> int | None:
        # A stride goes back to the document's first token.
        if self.stride or not self.window:
            return None
        return self.window

    def matrices(self, config: ModelFields) -> int:
        # Queries and output, keys and values.
        heads = 2 * (config.num_heads + config.num_kv_heads)
        if config.attention_gate:
            heads += config.num_heads
        return heads * config.hidden_size * config.head_dim

    def vectors(self, config: ModelFields) -> int:
        counts = 0
        if config.qkv_bias:
            heads = config.num_heads + 2 * config.num_kv_heads
            if config.attention_gate:
                heads += config.num_heads
            counts += heads * config.head_dim
        return counts + output_bias(config) + sinks(config)

    def norms(self, config: ModelFields) -> int:
        if config.qk_norm == "none":
            return 0
        # One head's weights for all queries, one for all keys.
        num_heads = 2
        if config.qk_norm == "full":
            num_heads = config.num_heads + config.num_kv_heads
        return norm_size(config, num_heads * config.head_dim)

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """``2·H·(D + V)`` a (query, key) pair that the mask leaves.

        Transformer-XL's relative positions are a second product over D.
        """
        # Two a multiply-and-add, in the product with the keys and in that with the values.
        scores = config.head_dim
        if config.position == "relative":
            scores *= 2
        pairs = attended_pairs(lengths, window=self.window, stride=self.stride, causal=self.causal)
        return 2 * config.num_heads * (scores + config.value_dim) * pairs

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> Cached:
        return Cached(self.cached_rows(num_tokens, chunk_tokens), config.num_kv_heads * self._row(config))

    def cached_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        """Tokens whose keys are stored: a window, and a chunk that is read with it."""
        if self.reach is None:
            return num_tokens
        # Queries of the chunk's first token still see a window before it.
        return min(num_tokens, self.reach + chunk_tokens)

    def _row(self, config: ModelFields) -> int:
        keys = config.head_dim
        if config.position == "relative":
            # Channels of the distance stand beside those of the content.
            keys += config.hidden_size
        return keys + config.value_dim


def output_bias(config: ModelFields) -> int:
    """Weights of the output projection's bias."""
    if config.o_bias:
        return config.hidden_size
    return 0


def sinks(config: ModelFields) -> int:
    """Learned logits that take a share of the softmax."""
    if config.sinks:
        return config.num_heads
    return 0


def attended_pairs(lengths: Iterable[int], *, window: int = 0, stride: int = 0, causal: bool = True) -> int:
    """(query, key) pairs that a mask within each document leaves: ``Σ n·(n + 1) / 2`` if it is causal.

    With a ``window`` w those at distances below w: ``Σ m·(m + 1)/2 + (n − m)·w``, m = min(n, w). A ``stride`` s adds
    the distances beyond the window that are multiples of s. Not causal, every pair but (i, i) has a mirror image.
    """
    total = 0
    for n in lengths:
        pairs = _pairs_of(n, window or n, stride)
        if not causal:
            # The mask is its own mirror image; the diagonal is counted once.
            pairs = 2 * pairs - n
        total += pairs
    return total


def _pairs_of(n: int, window: int, stride: int) -> int:
    near = min(n, window)
    pairs = near * (near + 1) // 2 + (n - near) * window
    if stride and n > window:
        # Query i meets i // stride multiples of the stride; those within its window are counted already.
        inside = (window - 1) // stride
        pairs += _sum_of_quotients(n, stride) - _sum_of_quotients(window, stride) - (n - window) * inside
    return pairs


def _sum_of_quotients(n: int, divisor: int) -> int:
    """Σ i // divisor over 0 ≤ i < n."""
    whole, rest = divmod(n, divisor)
    return divisor * whole * (whole - 1) // 2 + rest * whole
