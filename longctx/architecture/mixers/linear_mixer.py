"""Linear attention (arXiv 2006.16236) with feature map elu + 1: a state instead of scores.

Axes: H query heads, K key/value heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.latent_mixer import LatentMixer
from longctx.architecture.mixers.mixer import CacheShape
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer
from longctx.errors import ConfigError


@dataclass(frozen=True)
class LinearMixer(SoftmaxMixer):
    """Linear attention: each token adds its key times its value to a state that later queries read.

    Projections are the same as in softmax attention.
    """

    name: ClassVar[str] = "linear"
    core: ClassVar[str] = "linear"
    has_scores: ClassVar[bool] = False

    @property
    def lookback_tokens(self) -> int | None:
        # No rows: one state represents all previous tokens.
        return 0

    def check(self, config: ModelFields) -> None:
        """Raise ConfigError for caps, scales, biases and sinks: linear layers have no scores to apply them to."""
        for name in ("attention_softcap", "attention_scale", "sinks"):
            if getattr(config, name):
                raise ConfigError(f"model.{name}={getattr(config, name)} has no effect on linear layers; leave it out.")
        if config.position in ("alibi", "t5", "relative"):
            raise ConfigError(
                f"model.position={config.position!r} is a bias on attention scores, which linear layers do not have. "
                "Try rope, learned, sinusoidal or none."
            )
        super().check(config)

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """Return forward FLOPs: ``2·(K + H)·D·V`` per token, for key times value and query times state."""
        heads = config.num_kv_heads + config.num_heads
        return 2 * heads * config.head_dim * config.value_dim * sum(lengths)

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> CacheShape:
        # One extra column accumulates the weights, which normalize the output.
        return CacheShape(state_values=config.num_kv_heads * config.head_dim * (config.value_dim + 1))


@dataclass(frozen=True)
class LatentLinearMixer(LinearMixer, LatentMixer):
    """Linear attention with heads that expand from latents; its state holds expanded keys."""

    name: ClassVar[str] = "latent_linear"
