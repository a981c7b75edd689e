"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 §2.1): keys and values expand from a narrow latent.

Axes: M model width, H heads, D query/key head size, V value head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.mixer import CacheShape
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer, output_bias, sinks
from longctx.errors import ConfigError


@dataclass(frozen=True)
class LatentMixer(SoftmaxMixer):
    """Softmax attention with heads that expand from query and key latents; a cache stores the latents."""

    name: ClassVar[str] = "latent"

    def check(self, config: ModelFields) -> None:
        if config.num_kv_heads != config.num_heads:
            raise ConfigError(
                f"model.num_kv_heads={config.num_kv_heads} must equal model.num_heads={config.num_heads} with latent "
                "attention: every head has its own keys."
            )
        if config.attention_gate:
            raise ConfigError("model.attention_gate=true is not supported with latent attention (model.kv_lora_rank).")
        if config.position not in ("rope", "none") or config.qk_norm != "none" or config.rope.partial != 1:
            raise ConfigError(
                f"latent attention (model.kv_lora_rank={config.kv_lora_rank}) applies rotary positions, if "
                "any, to model.rope_head_dim channels, and norms to its latents: use model.position=rope (or none), "
                "model.rope.partial=1, model.qk_norm=none."
            )
        if config.rope.query_growth:
            raise ConfigError(
                f"model.rope.query_growth={config.rope.query_growth} scales full queries, but latent attention rotates "
                "only some of their channels. Leave it out."
            )
        if not 0 < config.rope_head_dim < config.head_dim:
            raise ConfigError(
                f"model.rope_head_dim={config.rope_head_dim} must be above 0 and below model.head_dim="
                f"{config.head_dim}, which includes it. Try {max(config.head_dim // 3 // 2 * 2, 2)}."
            )

    def matrices(self, config: ModelFields) -> int:
        M, H, D, V = config.hidden_size, config.num_heads, config.head_dim, config.value_dim
        latent, rotary = config.kv_lora_rank, config.rope_head_dim
        queries = M * H * D
        if config.q_lora_rank:
            queries = config.q_lora_rank * (M + H * D)
        # Rotary keys are projected from hidden states, once for all heads; the other channels come from the latent.
        keys_and_values = M * (latent + rotary) + latent * H * (D - rotary + V)
        return queries + keys_and_values + H * V * M

    def vectors(self, config: ModelFields) -> int:
        counts = 0
        if config.qkv_bias:
            # Only the projections into latents have biases.
            counts += config.q_lora_rank + config.kv_lora_rank + config.rope_head_dim
        return counts + output_bias(config) + sinks(config)

    def norms(self, config: ModelFields) -> int:
        # Latents use RMSNorm for any value in ``norm``.
        return config.q_lora_rank + config.kv_lora_rank

    def cached(self, config: ModelFields, num_tokens: int, chunk_tokens: int) -> CacheShape:
        # Values need no entries: they expand from the same latent as keys.
        return CacheShape(self.cached_rows(num_tokens, chunk_tokens), config.kv_lora_rank + config.rope_head_dim)
