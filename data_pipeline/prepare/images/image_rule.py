"""``ImageRule``: how images get the size and channels of their data set, or why they cannot."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from data_pipeline.prepare.images.decode_image import decode_image, fit_image
from longctx.errors import DataError
from longctx.images.image_format import ImageFormat


@dataclass(frozen=True, kw_only=True)
class ImageRule:
    """Conversions that the user asked for. Without them every image must have the data set's shape already."""

    size: tuple[int, int] | None = None
    """Height and width to which every image is scaled and cut; None: unchanged."""
    channels: int | None = None
    """Channels to which every image is converted; None: unchanged."""
    shape_from: str = ""
    """Image or folder that set the data set's shape, for messages."""

    def options(self) -> dict[str, Any]:
        """Return the manifest's entry; empty without conversions."""
        options: dict[str, Any] = {}
        if self.size is not None:
            options["image_size"] = list(self.size)
        if self.channels is not None:
            options["channels"] = self.channels
        return options

    def pixels(self, content: bytes | np.ndarray) -> np.ndarray:
        """Return an image's pixels after conversion, uint8 [H, W, C]; raise FileContentError if it is unreadable."""
        if isinstance(content, bytes):
            content = decode_image(content)
        return fit_image(content, size=self.size, channels=self.channels)

    def check_shape(self, name: str, pixels: np.ndarray, image_format: ImageFormat) -> None:
        """Raise DataError if an image differs from the data set's shape, with the option that converts it."""
        height, width, channels = pixels.shape
        if (height, width) != (image_format.height, image_format.width):
            size = f"{image_format.height}x{image_format.width}"
            if image_format.height == image_format.width:
                size = f"{image_format.height}"
            raise DataError(
                f"{name} has {height} x {width} pixels, but {self.shape_from} has {image_format.height} x "
                f"{image_format.width}: all images in a folder have one size.\nScale and cut them with --image-size "
                f"{size}, or leave some out with --exclude."
            )
        if channels != image_format.channels:
            raise DataError(
                f"{name} has {_channels(channels)}, but {self.shape_from} has {_channels(image_format.channels)}.\n"
                f"Convert them with --channels {image_format.channels}, or leave some out with --exclude."
            )


def label_of(name: str, label: int | str | None, image_format: ImageFormat, numbers: dict[str, int]) -> int:
    """Return an image's class index, -1 without classes; raise DataError for a label beyond the classes.

    ``numbers`` are the classes' indices by name.
    """
    if not image_format.classes:
        return -1
    if label is None:
        raise DataError(
            f"{name} has no label, but the images have {len(numbers)} classes. Leave it out with --exclude."
        )
    number = numbers.get(label, -1) if isinstance(label, str) else label
    if not 0 <= number < len(numbers):
        shown = ", ".join(list(numbers)[:6])
        if len(numbers) > 6:
            shown += ", …"
        raise DataError(
            f"{name} has label {label!r}, which is beyond the {len(numbers)} classes ({shown}).\n"
            "Leave --tokenizer out to take the classes from the source, or leave such images out with --exclude."
        )
    return number


def _channels(count: int) -> str:
    if count == 1:
        return "1 channel (grey)"
    return f"{count} channels (color)"
