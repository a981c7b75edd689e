"""Rules for models of images, and for class heads."""

from __future__ import annotations

from dataclasses import fields

from longctx.architecture.fields import ModelFields
from longctx.errors import ConfigError
from longctx.untrusted.strict_json import shown

_OF_TOKEN_IDS = (
    "embedding_size",
    "encoder_layers",
    "mtp_layers",
    "segments",
    "position_offset",
    "head_transform",
    "head_bias",
    "pair_head",
    "embedding_scale",
    "logit_scale",
    "logit_softcap",
)
"""Fields that need token ids or a token head, which a model of patches lacks."""


_WINDOWS = ("image_window", "shifted_window")
"""Layer kinds that attend in windows of patches."""


def check_image(config: ModelFields) -> None:
    """Raise ConfigError if tokens, positions and heads do not suit the model's images."""
    image = config.image
    if config.vocab_size < 1 and not image.patch:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size} must be at least 1; only a model of patches (model.image.patch) has "
            "no token ids."
        )
    if image.patch:
        _check_patches(config)
    if image.is_used and config.position == "learned" and config.max_positions != image.num_tokens:
        raise ConfigError(
            f"model.max_positions={config.max_positions} must be the number of tokens in an image of {image.height} × "
            f"{image.width} pixels.\nTry --model.max_positions {image.num_tokens}."
        )
    _check_windows(config)
    _check_classes(config)


def _check_patches(config: ModelFields) -> None:
    """Raise ConfigError for token ids, or a mask, in a model of patches."""
    if config.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.vocab_size}: with model.image.patch={config.image.patch} tokens are patches, "
            "without ids.\nTry --model.vocab_size 0."
        )
    if config.causal:
        raise ConfigError(
            f"model.causal=true, but patches (model.image.patch={config.image.patch}) have no order to be predicted "
            "in.\nTry --model.causal false."
        )
    defaults = {field.name: field.default for field in fields(ModelFields)}
    for name in (*_OF_TOKEN_IDS, "token_head"):
        value = getattr(config, name)
        if value != defaults[name]:
            raise ConfigError(
                f"model.{name}={shown(value)} has no effect on a model of patches, which has no token ids. Leave it "
                "out."
            )


def _check_classes(config: ModelFields) -> None:
    """Raise ConfigError if the class head has no classes, or reads a token that does not see the image."""
    if not config.classes:
        for name, default in (("class_pool", "first"), ("class_bias", True)):
            value = getattr(config, name)
            if value != default:
                raise ConfigError(
                    f"model.{name}={shown(value)} configures the class head, but model.classes=0. Leave it out, or set "
                    "model.classes."
                )
        if not config.token_head:
            raise ConfigError("model.token_head=false leaves a class head, but model.classes=0. Set model.classes.")
        return
    if not config.image.is_used:
        raise ConfigError(
            f"model.classes={config.classes} needs labelled images (model.image), but the model reads texts. Set "
            "model.classes=0, or model.image.height and width."
        )
    if config.class_pool != "first":
        return
    if config.causal:
        raise ConfigError(
            "model.class_pool='first' reads the first token, which sees only itself with model.causal=true.\n"
            "Try --model.class_pool mean."
        )
    if config.image.patch and not config.image.class_token:
        raise ConfigError(
            "model.class_pool='first' reads the class token, but model.image.class_token=false.\n"
            "Try --model.image.class_token true, or --model.class_pool mean."
        )


def _check_windows(config: ModelFields) -> None:
    """Raise ConfigError unless windows and stages divide the patches."""
    image, kinds = config.image, set(config.layers)
    has_windows = bool(kinds & set(_WINDOWS))
    if bool(image.window) != has_windows or (has_windows and kinds - set(_WINDOWS)):
        raise ConfigError(
            f"model.image.window={image.window} with model.layers={list(config.layers)}: windows need image_window and "
            "shifted_window layers, and only such layers.\nTry --model.layers image_window shifted_window, or "
            "--model.image.window 0."
        )
    if not image.window:
        if image.depths:
            raise ConfigError(
                f"model.image.depths={list(image.depths)} needs window layers (model.image.window). Leave it out."
            )
        return
    if not image.depths:
        # Only stages put the patches of a window next to each other.
        raise ConfigError(
            f"model.image.window={image.window} needs stages, and model.image.depths is empty.\n"
            f"Try --model.image.depths {config.num_layers} for one stage."
        )
    if image.class_token:
        raise ConfigError(
            "model.image.class_token=true is in no window (model.image.window). Set it to false, and "
            "model.class_pool='mean'."
        )
    num_stages = len(image.depths)
    # Every stage but the first halves the grid, and windows must fill each.
    unit = image.patch * image.window * 2 ** (num_stages - 1)
    for name in ("height", "width"):
        side = getattr(image, name)
        if side % unit:
            below, above = side // unit * unit, -(-side // unit) * unit
            nearest = " or ".join(str(n) for n in (below, above) if n)
            raise ConfigError(
                f"model.image.{name}={side} does not divide into windows: with model.image.patch={image.patch}, "
                f"model.image.window={image.window} and {num_stages} stages it must be a multiple of {unit}.\n"
                f"Try model.image.{name}={nearest}."
            )
    if min(image.depths) < 1 or sum(image.depths) != config.num_layers:
        raise ConfigError(
            f"model.image.depths={list(image.depths)} must list at least one layer per stage, and model.num_layers="
            f"{config.num_layers} layers in all. Try model.num_layers={sum(image.depths)}."
        )
    if config.num_experts or config.shared_layers:
        raise ConfigError(
            "model.image.depths is not supported with experts or shared layers: stages have different widths. Set "
            "model.num_experts=0 and model.shared_layers=false."
        )
    if config.residual_dropout:
        # Dropout hashes token and layer numbers, which repeat in each stage.
        raise ConfigError(
            f"model.residual_dropout={config.residual_dropout} is not supported with stages (model.image.depths). Set "
            "model.residual_dropout=0."
        )
