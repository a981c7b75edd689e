"""``Mixer``: what a layer mixes its tokens by, as a value: which tokens see which, and what that takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from longctx.architecture.fields import ModelFields


class Cached(NamedTuple):
    """What the cache of one layer stores of a sequence."""

    rows: int = 0
    """Tokens of which it has a row; ranks that share the sequence divide them."""
    row_values: int = 0
    """Numbers of a row, in the model's dtype."""
    state_values: int = 0
    """Numbers that do not grow with the sequence, in the dtype of accumulation, whole on every rank."""


class KeyHeads(NamedTuple):
    """Keys and values of a layer."""

    num_heads: int
    head_dim: int
    """Of one key, and of one query."""


@dataclass(frozen=True)
class Mixer:
    """The mixer of a layer. Layers with equal ones share a plan in each forward pass.

    A subclass is one file here, one in ``longctx/model/mixers`` (its projections, and its core in one process) and, if
    its core is a new one, one in ``parallel/attention`` (its core over ranks).
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
        """Tokens before a query whose rows it needs, itself included; None for all, 0 if it reads a state of them."""
        raise NotImplementedError

    def key_heads(self, config: ModelFields) -> KeyHeads:
        """Key heads of the layer's projections."""
        return KeyHeads(config.num_kv_heads, config.head_dim)

    def check(self, config: ModelFields) -> None:
        """ConfigError for fields that the mixer cannot have."""

    def matrices(self, config: ModelFields) -> int:
        """Weights of the projections' matrices."""
        raise NotImplementedError

    def vectors(self, config: ModelFields) -> int:
        """Weights of their biases, and of sinks."""
        raise NotImplementedError

    def norms(self, config: ModelFields) -> int:
        """Weights of norms inside of the mixer, such as those of queries and keys."""
        return 0

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """FLOPs of mixing proper, forward, over documents of these lengths: the projections are not in it.

        Backward is taken to be twice that.
        """
        raise NotImplementedError

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> Cached:
        """What a cache of so many tokens stores, of which ``chunk_tokens`` are read at a time."""
        raise NotImplementedError


def norm_size(config: ModelFields, channels: int) -> int:
    """Parameters of one norm: a LayerNorm has a bias beside its weight."""
    if config.norm == "layernorm":
        return 2 * channels
    return channels
