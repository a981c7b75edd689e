"""The gated delta rule (arXiv 2412.06464) and Kimi Delta Attention (arXiv 2510.26692): a state instead of scores.

Axes: M model width, K key heads, H value heads, D key head size, V value head size, W convolution width in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.mixer import CacheShape, Mixer
from longctx.errors import ConfigError


@dataclass(frozen=True)
class GatedDeltaMixer(Mixer):
    """Gated DeltaNet: one decay per head, an output gate as wide as the values."""

    name: ClassVar[str] = "gated_delta"
    core: ClassVar[str] = "gated_delta"
    has_scores: ClassVar[bool] = False

    @property
    def lookback_tokens(self) -> int | None:
        # No rows: one state represents all previous tokens.
        return 0

    def check(self, config: ModelFields) -> None:
        """Raise ConfigError for bidirectional layers and for invalid sizes."""
        if not config.causal:
            raise ConfigError(
                f"model.causal=false: {self.name} layers are always causal. Use model.causal=true, or other "
                "kinds in model.layers."
            )
        sizes = config.delta_sizes
        if sizes.value_heads % sizes.key_heads:
            raise ConfigError(
                f"model.delta_value_heads={sizes.value_heads} must be a multiple of model.delta_key_heads="
                f"{sizes.key_heads}. Try {sizes.key_heads} or {2 * sizes.key_heads}."
            )
        if config.delta_conv < 1:
            raise ConfigError(
                f"model.delta_conv={config.delta_conv} must be at least 1 token. Published models have 4."
            )

    def matrices(self, config: ModelFields) -> int:
        sizes = config.delta_sizes
        values = sizes.value_heads * sizes.value_dim
        # Queries, keys and values; the gate; decay and β; and the output projection.
        return config.hidden_size * (sizes.channels + values + 2 * sizes.value_heads + values)

    def vectors(self, config: ModelFields) -> int:
        sizes = config.delta_sizes
        # Convolution weights; A_log and dt_bias for each value head.
        return sizes.channels * sizes.conv + 2 * sizes.value_heads

    def norms(self, config: ModelFields) -> int:
        # All heads share one head's weights.
        return config.delta_sizes.value_dim

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """Return forward FLOPs: ``6·H·D·V`` per token to read, write and query states, ``2·W`` per channel to convolve.

        Work within chunks is excluded: it depends on the algorithm.
        """
        sizes = config.delta_sizes
        states = 6 * sizes.value_heads * sizes.key_dim * sizes.value_dim
        return (states + 2 * sizes.conv * sizes.channels) * sum(lengths)

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> CacheShape:
        sizes = config.delta_sizes
        # The convolution also caches the previous W - 1 tokens.
        states = sizes.value_heads * sizes.key_dim * sizes.value_dim
        return CacheShape(state_values=states + (sizes.conv - 1) * sizes.channels)


@dataclass(frozen=True)
class KimiDeltaMixer(GatedDeltaMixer):
    """Kimi Delta Attention: one decay per key channel; decays and the output gate come from narrow latents."""

    name: ClassVar[str] = "kda"

    def check(self, config: ModelFields) -> None:
        super().check(config)
        sizes = config.delta_sizes
        if (sizes.key_heads, sizes.key_dim) != (sizes.value_heads, sizes.value_dim):
            raise ConfigError(
                f"kda layers need equal numbers and sizes of key and value heads; got {sizes.key_heads} key heads "
                f"with size {sizes.key_dim} and {sizes.value_heads} value heads with size {sizes.value_dim}. Leave out "
                "model.delta_value_heads and model.delta_value_dim."
            )

    def matrices(self, config: ModelFields) -> int:
        sizes = config.delta_sizes
        # Decays and the output gate are low-rank: two projections through latents as wide as one key head.
        width, latent = sizes.key_heads * sizes.key_dim, sizes.key_dim
        latents = 2 * latent * (config.hidden_size + width)
        return config.hidden_size * (sizes.channels + sizes.key_heads + width) + latents

    def vectors(self, config: ModelFields) -> int:
        sizes = config.delta_sizes
        # Convolution weights; A_log per head, and dt_bias per key channel.
        return sizes.channels * sizes.conv + sizes.key_heads + sizes.key_heads * sizes.key_dim


@dataclass(frozen=True)
class Mamba2Mixer(GatedDeltaMixer):
    """Mamba-2 (arXiv 2405.21060): gated states without delta correction; one number per head sets decay and step."""

    name: ClassVar[str] = "mamba2"

    def check(self, config: ModelFields) -> None:
        super().check(config)
        if config.delta_negative:
            raise ConfigError(
                "model.delta_negative=true applies to gated_delta and kda layers; mamba2 has no such step."
            )

    def matrices(self, config: ModelFields) -> int:
        sizes = config.delta_sizes
        values = sizes.value_heads * sizes.value_dim
        # Queries, keys and values; the gate; step sizes; and the output projection.
        return config.hidden_size * (sizes.channels + values + sizes.value_heads + values)

    def vectors(self, config: ModelFields) -> int:
        sizes = config.delta_sizes
        # The convolution and its bias; rates, their biases, and the skip weights around the states.
        return sizes.channels * (sizes.conv + 1) + 3 * sizes.value_heads

    def norms(self, config: ModelFields) -> int:
        # Unlike in the other kinds, each head has its own weights.
        return config.delta_sizes.value_heads * config.delta_sizes.value_dim

    def flops(self, config: ModelFields, lengths: Sequence[int]) -> int:
        """Return forward FLOPs: ``4·H·D·V`` per token to write and query states, ``2·W`` per channel to convolve."""
        sizes = config.delta_sizes
        states = 4 * sizes.value_heads * sizes.key_dim * sizes.value_dim
        return (states + 2 * sizes.conv * sizes.channels) * sum(lengths)
