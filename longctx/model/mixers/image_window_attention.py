"""Projections for attention in an image's windows.

Axes: M model width, H heads, R relative positions of two patches in a window.
"""

from __future__ import annotations

from torch import Tensor

from longctx.architecture.layer_specs import LayerSpec
from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.config import ModelConfig
from longctx.model.layers.linear import Weight
from longctx.model.mixers.grouped_query_attention import GroupedQueryAttention


class ImageWindowAttention(GroupedQueryAttention):
    """Multi-head projections, and a bias per relative position and head."""

    def __init__(self, config: ModelConfig, spec: LayerSpec) -> None:
        super().__init__(config, spec)
        assert isinstance(spec.mixer, ImageWindowMixer)
        self.relative_bias = Weight(spec.mixer.num_biases, config.num_heads)

    def core_weights(self) -> tuple[Tensor, ...]:
        """Return the biases [H, R]."""
        return (self.relative_bias().mT,)
