"""Softmax attention with grouped queries: K = H is multi-head, K = 1 multi-query attention.

Axes: M model width, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.mixer import Cached, KeyHeads, Mixer, norm_size
from longctx.errors import ConfigError


@dataclass(frozen=True)
class Softmax(Mixer):
    """Softmax attention: queries weigh the values of the visible keys by the softmax of their scores."""

    has_own_heads: bool = False
    """Whether its heads are those of ``global_kv_heads`` and ``global_head_dim``."""

    name: ClassVar[str] = "softmax"
    core: ClassVar[str] = "softmax"
    has_scores: ClassVar[bool] = True

    def key_heads(self, config: ModelFields) -> KeyHeads:
        if not self.has_own_heads:
            return super().key_heads(config)
        return KeyHeads(config.global_kv_heads or config.num_kv_heads, config.global_head_dim or config.head_dim)

    def shares_values(self, config: ModelFields) -> bool:
        """Return whether values equal keys, without a projection of their own."""
        return self.has_own_heads and config.global_shared_values

    def check(self, config: ModelFields) -> None:
        K, D = self.key_heads(config)
        if config.num_heads % K:
            divisors = [n for n in range(1, config.num_heads + 1) if config.num_heads % n == 0]
            raise ConfigError(
                f"model.global_kv_heads={K} does not divide model.num_heads={config.num_heads}. Try one of {divisors}."
            )
        if config.position == "rope" and self.has_own_heads:
            config.rope.check_size(config.rope.rotary_size(D))
        if self.has_own_heads and config.position == "relative":
            raise ConfigError(
                "model.position='relative' has weights for heads of one size, and global layers have heads of their "
                "own. Use another position, or full layers."
            )

    @property
    def reach(self) -> int | None:
        # A stride reaches back to the document's first token.
        if self.stride or not self.window:
            return None
        return self.window

    def matrices(self, config: ModelFields) -> int:
        # Queries and output, keys and values.
        K, D = self.key_heads(config)
        heads = 2 * config.num_heads + K * (2 - self.shares_values(config))
        if config.attention_gate:
            heads += config.num_heads
        return heads * config.hidden_size * D

    def vectors(self, config: ModelFields) -> int:
        counts = 0
        K, D = self.key_heads(config)
        if config.qkv_bias:
            heads = config.num_heads + K * (2 - self.shares_values(config))
            if config.attention_gate:
                heads += config.num_heads
            counts += heads * D
        return counts + output_bias(config) + sinks(config)

    def norms(self, config: ModelFields) -> int:
        if config.qk_norm == "none":
            return 0
        # All queries share one head's weights, and so do all keys.
        num_heads, (K, D) = 2, self.key_heads(config)
        if config.qk_norm == "full":
            num_heads = config.num_heads + K
        return norm_size(config, num_heads * D)

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """Return the FLOPs: ``2·H·(D + V)`` per (query, key) pair that the mask allows.

        Transformer-XL's relative positions are a second product over D.
        """
        # Two FLOPs per multiply-add, in the product with the keys and in that with the values.
        D = self.key_heads(config).head_dim
        channels = D + self._value_dim(config)
        if config.position == "relative":
            channels += D
        pairs = attended_pairs(lengths, window=self.window, stride=self.stride, causal=self.causal)
        return 2 * config.num_heads * channels * pairs

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> Cached:
        K = self.key_heads(config).num_heads
        return Cached(self.cached_rows(num_tokens, chunk_tokens), K * self._row(config))

    def cached_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        """Return the number of tokens with stored keys: a window, plus a chunk that is read with it."""
        if self.reach is None:
            return num_tokens
        # Queries of the chunk's first token still see a full window before it.
        return min(num_tokens, self.reach + chunk_tokens)

    def _row(self, config: ModelFields) -> int:
        D = self.key_heads(config).head_dim
        keys = D
        if config.position == "relative":
            # Channels of the distance are stored next to those of the content.
            keys += config.hidden_size
        return keys + self._value_dim(config)

    def _value_dim(self, config: ModelFields) -> int:
        return self.key_heads(config).head_dim if self.has_own_heads else config.value_dim


def output_bias(config: ModelFields) -> int:
    """Return the number of weights in the output projection's bias."""
    if config.o_bias:
        return config.hidden_size
    return 0


def sinks(config: ModelFields) -> int:
    """Return the number of sinks: learned logits that take a share of the softmax."""
    if config.sinks:
        return config.num_heads
    return 0


def attended_pairs(lengths: Iterable[int], *, window: int = 0, stride: int = 0, causal: bool = True) -> int:
    """Return the number of (query, key) pairs that a mask within each document allows: ``Σ n·(n + 1) / 2`` if causal.

    With a ``window`` w only pairs at distances below w count: ``Σ m·(m + 1)/2 + (n − m)·w``, m = min(n, w). A
    ``stride`` s adds the distances beyond the window that are multiples of s. If not causal, every pair except (i, i)
    has a mirror image.
    """
    total = 0
    for n in lengths:
        pairs = _pairs_of(n, window or n, stride)
        if not causal:
            # The mask is its own mirror image; the diagonal counts once.
            pairs = 2 * pairs - n
        total += pairs
    return total


def _pairs_of(n: int, window: int, stride: int) -> int:
    near = min(n, window)
    pairs = near * (near + 1) // 2 + (n - near) * window
    if stride and n > window:
        # Query i reaches i // stride multiples of the stride; those within its window have been counted.
        inside = (window - 1) // stride
        pairs += _sum_of_quotients(n, stride) - _sum_of_quotients(window, stride) - (n - window) * inside
    return pairs


def _sum_of_quotients(n: int, divisor: int) -> int:
    """Return Σ i // divisor over 0 ≤ i < n."""
    whole, rest = divmod(n, divisor)
    return divisor * whole * (whole - 1) // 2 + rest * whole
