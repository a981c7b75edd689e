"""``Mixer``: a layer's token mixing as a value: visible tokens, parameter counts, FLOPs and cache sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from longctx.architecture.fields import ModelFields


class CacheShape(NamedTuple):
    """One layer's cache contents for a sequence."""

    rows: int = 0
    """Tokens with a cached row; ranks that share the sequence divide them."""
    row_values: int = 0
    """Values per row, in the model's dtype."""
    state_values: int = 0
    """Values that do not grow with the sequence, in the accumulation dtype, replicated on every rank."""


class KeyHeads(NamedTuple):
    """Number and size of a layer's key/value heads."""

    num_heads: int
    head_dim: int
    """Size of one key or query."""


@dataclass(frozen=True)
class Mixer:
    """A layer's token mixer. Layers with equal mixers share a plan in each forward pass.

    A subclass has one file here, one in ``longctx/model/mixers`` (projections and single-process core) and, if its core
    is new, one in ``parallel/attention`` (core over ranks).
    """

    causal: bool = True
    """True if a token sees only itself and earlier tokens."""
    window: int = 0
    """Tokens that a query sees, including itself; 0 for all."""
    stride: int = 0
    """Beyond the window, a query sees tokens at multiples of this distance; 0 disables it."""

    name: ClassVar[str]
    """Key in the network table (``longctx.model.mixers.mixer_networks``)."""
    core: ClassVar[str]
    """Key for the attention core, in one process and over ranks."""
    has_scores: ClassVar[bool]
    """True if queries and keys have scores, which sinks, caps and biases change and diagnostics can read."""

    @property
    def lookback_tokens(self) -> int | None:
        """Tokens with rows that a query reads, up to and including itself; None for all, 0 if it reads a state."""
        raise NotImplementedError

    def key_heads(self, config: ModelFields) -> KeyHeads:
        """Return the key/value heads in the layer's projections."""
        return KeyHeads(config.num_kv_heads, config.head_dim)

    def check(self, config: ModelFields) -> None:
        """Raise ConfigError for fields that the mixer does not support."""

    def matrices(self, config: ModelFields) -> int:
        """Count weights in the projection matrices."""
        raise NotImplementedError

    def vectors(self, config: ModelFields) -> int:
        """Count weights in projection biases, sinks, and the mixer's own position biases."""
        raise NotImplementedError

    def norms(self, config: ModelFields) -> int:
        """Count weights in norms inside the mixer, such as query and key norms."""
        return 0

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """Return forward FLOPs to mix documents with these lengths, without projections.

        Backward is assumed to cost twice that.
        """
        raise NotImplementedError

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> CacheShape:
        """Return the cache contents for ``num_tokens`` tokens, read ``chunk_tokens`` at a time."""
        raise NotImplementedError


def norm_size(config: ModelFields, channels: int) -> int:
    """Count parameters in one norm: a LayerNorm has a bias in addition to its weight."""
    if config.norm == "layernorm":
        return 2 * channels
    return channels
