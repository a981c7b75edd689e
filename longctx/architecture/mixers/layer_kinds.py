"""Layer kinds that a config can name (``model.layers``), each with its mixer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields

from longctx.architecture.fields import DeltaFields, GlobalFields, ModelFields
from longctx.architecture.mixers.gated_delta_mixer import GatedDeltaMixer, KimiDeltaMixer, Mamba2Mixer
from longctx.architecture.mixers.image_window_mixer import ImageWindowMixer
from longctx.architecture.mixers.latent_mixer import LatentMixer
from longctx.architecture.mixers.linear_mixer import LatentLinearMixer, LinearMixer
from longctx.architecture.mixers.mixer import Mixer
from longctx.architecture.mixers.softmax_mixer import SoftmaxMixer
from longctx.errors import ConfigError

# Latents apply model-wide: either all layers have them or no layer does, for any mask.


def _softmax(config: ModelFields, *, window: int = 0, stride: int = 0) -> Mixer:
    if config.is_latent:
        return LatentMixer(config.causal, window, stride)
    return SoftmaxMixer(config.causal, window, stride)


def _linear(config: ModelFields) -> Mixer:
    if config.is_latent:
        return LatentLinearMixer(config.causal)
    return LinearMixer(config.causal)


def _global(config: ModelFields) -> Mixer:
    if config.is_latent:
        raise ConfigError(
            "model.layers contains global layers, which have their own key heads: they are not supported with latent "
            "attention (model.kv_lora_rank). Use full layers."
        )
    return SoftmaxMixer(config.causal, has_own_heads=True)


def _image_window(config: ModelFields, *, is_shifted: bool) -> Mixer:
    image = config.image
    if not image.patch or not image.window:
        raise ConfigError(
            "image_window layers need model.image.patch and model.image.window, for example 4 and 7. Set both, or use "
            "full layers."
        )
    (rows, columns), shift = image.grid, 0
    # A window as large as the image has nowhere to go.
    if is_shifted and min(rows, columns) > image.window:
        shift = image.window // 2
    return ImageWindowMixer(config.causal, rows=rows, columns=columns, side=image.window, shift=shift)


MIXERS: dict[str, Callable[[ModelFields], Mixer]] = {
    "full": _softmax,
    "window": lambda config: _softmax(config, window=config.window),
    "sparse": lambda config: _softmax(config, window=config.window, stride=config.sparse_stride),
    "global": _global,
    "linear": _linear,
    "gated_delta": lambda config: GatedDeltaMixer(config.causal),
    "kda": lambda config: KimiDeltaMixer(config.causal),
    "mamba2": lambda config: Mamba2Mixer(config.causal),
    "image_window": lambda config: _image_window(config, is_shifted=False),
    "shifted_window": lambda config: _image_window(config, is_shifted=True),
}
"""Mixer constructors by layer kind."""
DELTA_FIELDS = tuple(f.name for f in fields(DeltaFields))
GLOBAL_FIELDS = tuple(f.name for f in fields(GlobalFields))
READS: dict[str, tuple[str, ...]] = {
    "window": ("window", "local_rope_theta"),
    "sparse": ("window", "sparse_stride"),
    "global": GLOBAL_FIELDS,
    "gated_delta": DELTA_FIELDS,
    "kda": DELTA_FIELDS,
    "mamba2": DELTA_FIELDS,
}
"""Fields that only these layer kinds read; without such a layer they must keep their defaults."""
