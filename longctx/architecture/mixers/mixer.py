"""``Mixer``: how a layer mixes its tokens, as a value: which tokens see which, and the cost in weights and FLOPs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from longctx.architecture.fields import ModelFields


class Cached(NamedTuple):
    """Contents of one layer's cache for a sequence."""

    rows: int = 0
    """Tokens of which it has a row; ranks that share the sequence divide them."""
    row_values: int = 0
    """Numbers of a row, in the model's dtype."""
    state_values: int = 0
    """Numbers that do not grow with the sequence, in the dtype of accumulation, whole on every rank."""


class KeyHeads(NamedTuple):
    """Number and size of a layer's key/value heads."""

    num_heads: int
    head_dim: int
    """Of one key, and of one query."""


@dataclass(frozen=True)
class Mixer:
    """Mixer of a layer. Layers with equal mixers share a plan in each forward pass.

    A subclass has one file here, one in ``longctx/model/mixers`` (its projections, and its core in one process) and, if
    its core is new, one in ``parallel/attention`` (its core over ranks).
    """

    causal: bool = True
    """Whether a token sees none behind it."""
    window: int = 0
    """Tokens that a query sees, itself included; 0 for all."""
    stride: int = 0
    """Beyond the window a query sees tokens a multiple of this before it; 0 for none."""

    name: ClassVar[str]
    """By which its network is found (``longctx.model.mixers.table``)."""
    core: ClassVar[str]
    """By which the core is found that its network is computed with, in one process and over ranks."""
    has_scores: ClassVar[bool]
    """Whether queries and keys have scores, which sinks, caps and biases change, and which can be looked at."""

    @property
    def reach(self) -> int | None:
        """Number of tokens up to a query, itself included, with rows it reads; None for all, 0 if it reads a state."""
        raise NotImplementedError

    def key_heads(self, config: ModelFields) -> KeyHeads:
        """Return the key/value heads of the layer's projections."""
        return KeyHeads(config.num_kv_heads, config.head_dim)

    def check(self, config: ModelFields) -> None:
        """Raise ConfigError for fields that the mixer does not support."""

    def matrices(self, config: ModelFields) -> int:
        """Return the number of weights in the projection matrices."""
        raise NotImplementedError

    def vectors(self, config: ModelFields) -> int:
        """Return the number of weights in the projection biases and sinks."""
        raise NotImplementedError

    def norms(self, config: ModelFields) -> int:
        """Return the number of weights in norms inside the mixer, such as those of queries and keys."""
        return 0

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """Return the forward FLOPs of mixing documents of these lengths, without the projections.

        Backward is assumed to cost twice that.
        """
        raise NotImplementedError

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> Cached:
        """Return the contents of a cache of ``num_tokens`` tokens, read ``chunk_tokens`` at a time."""
        raise NotImplementedError


def norm_size(config: ModelFields, channels: int) -> int:
    """Return the number of parameters in one norm: a LayerNorm has a bias besides its weight."""
    if config.norm == "layernorm":
        return 2 * channels
    return channels
