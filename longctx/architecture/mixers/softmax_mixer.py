"""Softmax attention with grouped queries: K = H is multi-head, K = 1 multi-query attention.

Axes: M model width, H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.mixer import CacheShape, KeyHeads, Mixer, norm_size
from longctx.errors import ConfigError


@dataclass(frozen=True)
class SoftmaxMixer(Mixer):
    """Softmax attention: queries average the visible values, weighted by softmax over their scores."""

    has_own_heads: bool = False
    """True if heads use ``global_kv_heads`` and ``global_head_dim``."""

    name: ClassVar[str] = "softmax"
    core: ClassVar[str] = "softmax"
    has_scores: ClassVar[bool] = True

    def key_heads(self, config: ModelFields) -> KeyHeads:
        if not self.has_own_heads:
            return super().key_heads(config)
        return KeyHeads(config.global_kv_heads or config.num_kv_heads, config.global_head_dim or config.head_dim)

    def shares_values(self, config: ModelFields) -> bool:
        """Return True if values equal keys, without their own projection."""
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
                "model.position='relative' supports one head size, but global layers have their own. Use another "
                "position, or full layers."
            )

    @property
    def lookback_tokens(self) -> int | None:
        # A stride reaches back to the document's first token.
        if self.stride or not self.window:
            return None
        return self.window

    def matrices(self, config: ModelFields) -> int:
        # Queries and output, then keys and values.
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
        # All query heads share one head's weights, and so do all key heads.
        num_heads, (K, D) = 2, self.key_heads(config)
        if config.qk_norm == "full":
            num_heads = config.num_heads + K
        return norm_size(config, num_heads * D)

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """Return forward FLOPs: ``2·H·(D + V)`` per (query, key) pair that the mask allows.

        Transformer-XL's relative positions add a second matmul over D.
        """
        # Two FLOPs per multiply-add, in QKᵀ and in the weighted sum over values.
        D = self.key_heads(config).head_dim
        channels = D + self._value_dim(config)
        if config.position == "relative":
            channels += D
        pairs = attended_pairs(lengths, window=self.window, stride=self.stride, causal=self.causal)
        return 2 * config.num_heads * channels * pairs

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> CacheShape:
        K = self.key_heads(config).num_heads
        return CacheShape(self.cached_rows(num_tokens, chunk_tokens), K * self._row(config))

    def cached_rows(self, num_tokens: int, chunk_tokens: int) -> int:
        """Count tokens with stored keys: at most one window plus the chunk that is read with it."""
        if self.lookback_tokens is None:
            return num_tokens
        # The chunk's first query still sees a full window before it.
        return min(num_tokens, self.lookback_tokens + chunk_tokens)

    def _row(self, config: ModelFields) -> int:
        D = self.key_heads(config).head_dim
        keys = D
        if config.position == "relative":
            # Keys for relative distances are stored in addition to content keys.
            keys += config.hidden_size
        return keys + self._value_dim(config)

    def _value_dim(self, config: ModelFields) -> int:
        return self.key_heads(config).head_dim if self.has_own_heads else config.value_dim


def output_bias(config: ModelFields) -> int:
    """Count weights in the output projection's bias."""
    if config.o_bias:
        return config.hidden_size
    return 0


def sinks(config: ModelFields) -> int:
    """Count sinks: learned logits that take a share in the softmax."""
    if config.sinks:
        return config.num_heads
    return 0


def attended_pairs(lengths: Iterable[int], *, window: int = 0, stride: int = 0, causal: bool = True) -> int:
    """Count (query, key) pairs that the mask allows within each document.

    A ``window`` keeps only distances below it; a ``stride`` adds distances beyond the window that are multiples of it.
    Without causality, every pair except (i, i) has a mirror image.
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
    # Causal pairs in one document: n·(n + 1)/2; with a window w, m·(m + 1)/2 + (n − m)·w for m = min(n, w).
    near = min(n, window)
    # The first queries see a growing prefix, all later ones a full window.
    pairs = near * (near + 1) // 2 + (n - near) * window
    if stride and n > window:
        # Query i has i // stride multiples at or before it; those within its window are already counted.
        inside = (window - 1) // stride
        pairs += _sum_of_quotients(n, stride) - _sum_of_quotients(window, stride) - (n - window) * inside
    return pairs


def _sum_of_quotients(n: int, divisor: int) -> int:
    """Return Σ i // divisor over 0 ≤ i < n."""
    # Each full quotient occurs ``divisor`` times, the last one only ``rest`` times.
    whole, rest = divmod(n, divisor)
    return divisor * whole * (whole - 1) // 2 + rest * whole
