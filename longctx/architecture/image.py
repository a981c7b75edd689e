"""``ImageShape``: the images that a model reads, and how they become tokens. Imports no tensor library."""

from __future__ import annotations

import math
from dataclasses import dataclass

from longctx.architecture.types import check_types
from longctx.errors import ConfigError

_MOST_PIXELS = 1 << 20
"""Upper bound for an image's height and width, far above any image."""


@dataclass(frozen=True, kw_only=True)
class ImageShape:
    """Images as documents: a token per patch (ViT), or per pixel (Image GPT)."""

    height: int = 0
    """Image height in pixels; 0 for a model of texts."""
    width: int = 0
    """Image width in pixels."""
    channels: int = 3
    """Channels per pixel: 3 for RGB, 1 for gray."""
    patch: int = 0
    """Patch height and width in pixels; a patch is a token. 0: each pixel is a token, by the id of its palette color
    (Image GPT)."""
    class_token: bool = False
    """Put a learned token before the patches, from which the class head reads (ViT)."""
    window: int = 0
    """Window height and width in patches, for image_window and shifted_window layers (Swin); 0 without such layers."""
    depths: tuple[int, ...] = ()
    """Layers per stage: after each stage but the last, four neighbouring patches are merged into one, and the width
    doubles (Swin). One number for windows in one stage; empty without windows."""
    mean: tuple[float, ...] = (0.5,)
    """Subtract this from pixel values, scaled to 0 … 1, before the patch projection: one number, or one per channel."""
    std: tuple[float, ...] = (0.5,)
    """Divide by this afterwards: one number, or one per channel."""

    def __post_init__(self) -> None:
        check_types(self, "model.image")
        for name in ("height", "width", "patch"):
            if not 0 <= getattr(self, name) <= _MOST_PIXELS:
                raise ConfigError(f"model.image.{name}={getattr(self, name)} must be between 0 and {_MOST_PIXELS:,}.")
        if not 1 <= self.channels <= 16:
            raise ConfigError(f"model.image.channels={self.channels} must be between 1 and 16. RGB images have 3.")
        for name in ("mean", "std"):
            if len(getattr(self, name)) not in (1, self.channels):
                raise ConfigError(
                    f"model.image.{name}={list(getattr(self, name))} must have one number, or one for each of "
                    f"model.image.channels={self.channels}. Try {[0.5] * self.channels}."
                )
        if not all(0 < number < math.inf for number in self.std):
            raise ConfigError(f"model.image.std={list(self.std)} must be positive. Try [0.5].")
        if bool(self.height) != bool(self.width):
            raise ConfigError(
                f"model.image.height={self.height} and model.image.width={self.width}: set both, or neither."
            )
        self._check_patch()

    def _check_patch(self) -> None:
        """Raise ConfigError unless the patch divides both sides."""
        if not self.patch:
            for name in ("class_token", "window", "depths", "mean", "std"):
                value, default = getattr(self, name), type(self).__dataclass_fields__[name].default
                if value != default:
                    raise ConfigError(
                        f"model.image.{name}={value} has no effect with model.image.patch=0, where each pixel is a "
                        "token. Leave it out, or set model.image.patch."
                    )
            return
        for name in ("height", "width"):
            side = getattr(self, name)
            if side % self.patch or not side:
                below, above = side // self.patch * self.patch, -(-max(side, 1) // self.patch) * self.patch
                nearest = " or ".join(str(n) for n in dict.fromkeys((below, above)) if n)
                raise ConfigError(
                    f"model.image.{name}={side} is not a multiple of model.image.patch={self.patch}.\n"
                    f"Try model.image.{name}={nearest}."
                )

    @property
    def is_used(self) -> bool:
        """True for a model of images."""
        return self.height > 0

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.height // self.patch, self.width // self.patch

    @property
    def num_patches(self) -> int:
        """Patches per image; 0 if each pixel is a token."""
        if not self.patch:
            return 0
        return math.prod(self.grid)

    @property
    def num_tokens(self) -> int:
        """Tokens per image."""
        return self.num_patches + self.class_token or self.height * self.width

    @property
    def pixel_bytes(self) -> int:
        """Pixel values per patch; 0 if each pixel is a token."""
        return self.channels * self.patch * self.patch
