"""``LayerSpec``: a layer's components as a value. Code that depends on a layer's kind reads its spec.

Model-wide properties, such as latents or the position kind, are config fields.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

from longctx.architecture.fields import ModelFields
from longctx.architecture.mixers.layer_kinds import MIXERS
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.rope import Rope


@dataclass(frozen=True)
class LayerSpec:
    """A layer's token mixer, per-token FFN and rotary positions."""

    mixer: Mixer
    ffn: Literal["dense", "experts"]
    rope: Rope | None
    """Rotation for queries and keys; None if they are not rotated."""
    rotary_size: int
    """Rotated channels per head; 0 without rotation."""
    norm_order: str
    """The config's norm order, with hybrid resolved for this layer."""


@lru_cache(maxsize=64)
def layer_specs(config: ModelFields) -> tuple[LayerSpec, ...]:
    """Return the model's layers in order, then its multi-token prediction blocks."""
    specs = []
    for layer in range(config.depth):
        # The config's patterns repeat over the depth; a spec describes one layer.
        ffn: Literal["dense", "experts"] = "dense"
        if config.has_experts(layer):
            ffn = "experts"
        rope, rotary_size, mixer = None, 0, _mixer(config, layer)
        if config.has_rope(layer):
            rope = config.rope_of(layer)
            # Latent attention sets its rotary channels directly.
            rotary_size = config.rope_head_dim or rope.rotary_size(mixer.key_heads(config).head_dim)
        specs.append(LayerSpec(mixer, ffn, rope, rotary_size, _norm_order(config, mixer)))
    return tuple(specs)


@lru_cache(maxsize=64)
def mixers_of(config: ModelFields) -> Mapping[Mixer, int]:
    """Return the model's distinct mixers in layer order, each with its layer count."""
    counts: dict[Mixer, int] = {}
    # Not from ``layer_specs``: rules call this before rotary positions are checked.
    for layer in range(config.depth):
        mixer = _mixer(config, layer)
        counts[mixer] = counts.get(mixer, 0) + 1
    return MappingProxyType(counts)


def can_share_prefixes(config: ModelFields) -> bool:
    """Return whether documents may continue another one in their row (``PackedDocuments.prefixes``)."""
    # A state or a stride would have to continue from the prefix's last token.
    return all(mixer.causal and mixer.has_scores and not mixer.stride for mixer in mixers_of(config))


def _norm_order(config: ModelFields, mixer: Mixer) -> str:
    if config.norm_order != "hybrid":
        return config.norm_order
    # OLMo Hybrid: pre-norm for recurrent layers, output norm for attention layers.
    if mixer.core == "gated_delta":
        return "pre"
    return "output"


def _mixer(config: ModelFields, layer: int) -> Mixer:
    return MIXERS[config.layer_kind(layer)](config)


def groups_of(heads: int, max_groups: int) -> int:
    """Return the group count for a layer's heads: the greatest common divisor of ``heads`` and ``max_groups``."""
    return math.gcd(heads, max_groups)
