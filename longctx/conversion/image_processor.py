"""Image processors in Hugging Face folders: how pixels are normalized, or which palette they have.

For patches, ``preprocessor_config.json`` has the values of ``model.image.mean`` and ``std``; for pixels as tokens it
has the palette of ``image.json``, the file that also holds the classes' names from config.json.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from longctx.architecture.fields import ModelFields
from longctx.architecture.image import ImageShape
from longctx.config import ModelConfig
from longctx.conversion.tensor_mismatches import format_names
from longctx.conversion.weights.json_files import read_checkpoint_json
from longctx.conversion.weights.weights_folder import resolve_weights_path
from longctx.errors import ConfigError
from longctx.families import FAMILIES, unwrap_config
from longctx.families.image_classes import default_names, label_keys, names_of_classes
from longctx.images.image_format import CHANNELS, MOST_SIDE, ImageFormat
from longctx.untrusted.strict_json import shown
from longctx.untrusted.untrusted_schema import NAME

PROCESSOR = "preprocessor_config.json"

Palette = tuple[tuple[float, ...], ...]

log = logging.getLogger(__name__)

_RESCALE = 1 / 255
_BILINEAR = 2
_MOST_CHARACTERS = 380
"""Characters that remain in a class name with its number added."""
_HALF = 0.5
"""Mean and standard deviation in the two classes below, for files without them."""
_HALF_BY_DEFAULT = ("ViTImageProcessor", "ViTFeatureExtractor", "ImageGPTImageProcessor", "ImageGPTFeatureExtractor")
_OTHER_PIXELS = ("do_flip_channel_order", "rescale_offset", "offset")
"""Keys in other classes that change values beyond their scale; resizing and cropping come before the model's input."""


def model_of_folder(folder: Path, hf_config: dict[str, Any], *, mtp: bool = False) -> ModelConfig:
    """Return the model in a Hugging Face folder: its config.json's, with the image processor's normalization or sides.

    Raise ConfigError if the decoder cannot be the model, or cannot read its pixels.
    """
    config = ModelConfig.from_hf(hf_config, mtp=mtp)
    values = _processor_of(folder, hf_config)
    if values is None:
        return config
    if config.image.patch:
        mean, std = _normalization(values, config.image.channels)
        return replace(config, image=replace(config.image, mean=mean, std=std))
    image, (height, width) = config.image, _resized_to(values)
    if height * width != image.num_tokens:
        height, width = image.height, image.width
    channels = image.channels
    palette = _palette(values, config)
    if palette:
        channels = len(palette[0])
    return replace(config, image=ImageShape(height=height, width=width, channels=channels))


def image_format_of_folder(folder: Path, hf_config: dict[str, Any], config: ModelConfig) -> ImageFormat | None:
    """Return the images' format for a model from ``model_of_folder``; None for texts, and without a palette for
    pixels.
    """
    image = config.image
    palette: Palette = ()
    names: tuple[str, ...] = ()
    if not image.is_used:
        return None
    if not image.patch:
        palette = _palette(_processor_of(folder, hf_config) or {}, config)
        if not palette:
            log.warning("%s has no palette (clusters in %s): data for it cannot be built from it.", folder, PROCESSOR)
            return None
    if image.channels not in CHANNELS or max(image.height, image.width) > MOST_SIDE:
        log.warning("%s: data cannot be built from it, with %d channels or sides so long.", folder, image.channels)
        return None
    if config.classes:
        names = _usable_names(names_of_classes(hf_config), folder)
    return ImageFormat(height=image.height, width=image.width, channels=image.channels, classes=names, palette=palette)


def processor_json(config: ModelFields, model_type: str, image_format: ImageFormat | None) -> dict[str, Any] | None:
    """Return the settings for an image processor that gives this model its input; None for texts, and without a palette
    for pixels.
    """
    image, kind = config.image, FAMILIES[model_type].image_processor
    if not kind or (not image.patch and image_format is None):
        return None
    height, width, channels = image.height, image.width, image.channels
    mean, std, palette = image.mean, image.std, {}
    if image_format is not None and not image.patch:
        # A model of pixels has its images' shape in the data's format.
        (height, width, channels), (mean, std) = image_format.shape, ((_HALF,), (_HALF,))
        # transformers compares colors of three channels.
        clusters = [list(color) * (3 // channels) for color in image_format.palette]
        palette = {"do_color_quantize": True, "clusters": clusters}
        channels = 3
    settings = {
        "image_processor_type": kind,
        "do_resize": True,
        "size": {"height": height, "width": width},
        "resample": _BILINEAR,
        "do_rescale": True,
        "rescale_factor": _RESCALE,
        "do_normalize": True,
        "image_mean": _per_channel(mean, channels),
        "image_std": _per_channel(std, channels),
        **palette,
    }
    if channels == 3:
        settings["do_convert_rgb"] = True
    return settings


def label_names(config: ModelFields, image_format: ImageFormat | None) -> dict[str, Any]:
    """Return the config.json keys with the names of a model's classes; empty without a class head."""
    if not config.classes:
        return {}
    names: Sequence[str] = default_names(config.classes)
    if image_format is not None and len(image_format.classes) == config.classes:
        names = image_format.classes
    return label_keys(names)


def _processor_of(folder: Path, hf_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the image processor's settings in a folder; None for a model of texts, and without the file."""
    family = FAMILIES[unwrap_config(dict(hf_config))["model_type"]]
    if not family.image_processor:
        return None
    path = folder / PROCESSOR
    # A dangling link does not exist; it is rejected instead of left out.
    if not path.exists() and not path.is_symlink():
        return None
    return read_checkpoint_json(resolve_weights_path(folder, PROCESSOR, named_by=folder))


def _normalization(values: Mapping[str, Any], channels: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and standard deviation, of one number if all channels have the same."""
    _check_scale(values)
    if not values.get("do_normalize", True):
        return (0.0,), (1.0,)
    kind = values.get("image_processor_type", values.get("feature_extractor_type", _HALF_BY_DEFAULT[0]))
    found = []
    for key in ("image_mean", "image_std"):
        if key not in values and str(kind).removesuffix("Fast") not in _HALF_BY_DEFAULT:
            raise ConfigError(
                f"{PROCESSOR} has no {key}, and its class {shown(kind)} may have another default than {_HALF}. Add "
                f"{key}."
            )
        found.append(_of_channels(key, values.get(key, _HALF), channels))
    return found[0], found[1]


def _of_channels(key: str, value: Any, channels: int) -> tuple[float, ...]:
    """Return a number per channel, or one if all are equal."""
    numbers = value if isinstance(value, list) else [value]
    is_number = [type(number) in (int, float) and math.isfinite(number) for number in numbers]
    if not numbers or not all(is_number) or (len(set(numbers)) > 1 and len(numbers) != channels):
        raise ConfigError(
            f"{key}={shown(value)} in {PROCESSOR} must be a number, or one for each of num_channels={channels}."
        )
    if len(set(numbers)) == 1:
        numbers = numbers[:1]
    return tuple(map(float, numbers))


def _check_scale(values: Mapping[str, Any]) -> None:
    """Raise ConfigError unless pixel values are scaled to 0 … 1 and not changed otherwise."""
    factor = values.get("rescale_factor", _RESCALE)
    is_usual = type(factor) in (int, float) and math.isclose(factor, _RESCALE, rel_tol=1e-6)
    if not values.get("do_rescale", True) or not is_usual:
        raise ConfigError(
            f"do_rescale={shown(values.get('do_rescale', True))} and rescale_factor={shown(factor)} in {PROCESSOR} are "
            f"not supported; supported: pixel values times 1/255."
        )
    for key in _OTHER_PIXELS:
        if values.get(key):
            raise ConfigError(
                f"{key}={shown(values[key])} in {PROCESSOR} is not supported, because it changes the pixels' values."
            )


def _palette(values: Mapping[str, Any], config: ModelFields) -> Palette:
    """Return the palette; empty without one. Raise ConfigError unless it has a color for each output."""
    clusters = values.get("clusters")
    if clusters is None:
        return ()
    _check_scale(values)
    if not values.get("do_normalize", True) or not values.get("do_color_quantize", True):
        raise ConfigError(
            f"do_normalize and do_color_quantize in {PROCESSOR} must be true for a model of a palette's colors."
        )
    for key in ("image_mean", "image_std"):
        if _of_channels(key, values.get(key, _HALF), 3) != (_HALF,):
            raise ConfigError(
                f"{key}={shown(values[key])} in {PROCESSOR} is not supported with a palette: use {_HALF}."
            )
    count = config.vocab_size - 1
    if not isinstance(clusters, list) or len(clusters) != count:
        raise ConfigError(
            f"clusters in {PROCESSOR} must be a list of {count} colors, one less than vocab_size={config.vocab_size}."
        )
    for color in clusters:
        is_color = isinstance(color, list) and len(color) == 3
        if not is_color or not all(type(part) in (int, float) and math.isfinite(part) for part in color):
            raise ConfigError(f"{shown(color)} among the clusters in {PROCESSOR} must be three numbers.")
    palette = tuple(tuple(map(float, color)) for color in clusters)
    # As written for gray images.
    if all(len(set(color)) == 1 for color in palette):
        palette = tuple(color[:1] for color in palette)
    return palette


def _resized_to(values: Mapping[str, Any]) -> tuple[int, int]:
    """Return the height and width that images are resized to; zeros if the settings do not say so."""
    height = width = values.get("size")
    if isinstance(height, dict):
        height, width = height.get("height"), height.get("width")
    if type(height) is not int or type(width) is not int or min(height, width) < 1:
        return 0, 0
    return height, width


def _usable_names(names: Sequence[str], folder: Path) -> tuple[str, ...]:
    """Return class names that differ and can be printed; log those that change."""
    found: dict[str, str] = {}
    for number, name in enumerate(names):
        try:
            NAME(name, "class")
            usable = name
        except ValueError:
            usable = f"LABEL_{number}"
        # ImageNet has two kinds of crane.
        while usable in found:
            usable = f"{usable[:_MOST_CHARACTERS]} ({number})"
        found[usable] = name
    changed = [f"{shown(name)} → {usable}" for usable, name in found.items() if usable != name]
    if changed:
        log.warning("%s: class names that are not unique or not printable: %s.", folder, format_names(changed))
    return tuple(found)


def _per_channel(numbers: Sequence[float], channels: int) -> list[float]:
    if len(numbers) == 1:
        return list(numbers) * channels
    return list(numbers)
