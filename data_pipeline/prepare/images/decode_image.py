"""Image files as arrays, and arrays in another size.

Files may come from anywhere. Only the formats in ``FORMATS`` are tried, because Pillow reads some others by starting a
program; Pillow's limit on pixels ends a decompression bomb before its memory is allocated.
"""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from data_pipeline.prepare.source_items import FileContentError

FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF")
_GREY = ("1", "L", "LA", "La")
"""Pillow's modes with one channel; alpha does not count."""
_WIDE = ("I", "F")
"""Beginnings of the modes with more than 8 bits per value, which cannot be converted without choosing a range."""


def decode_image(content: bytes) -> np.ndarray:
    """Return an image file's pixels, uint8 [H, W, C], with 1 channel for grey and 3 otherwise.

    EXIF orientation is applied, transparency is dropped, and from an animation the first frame is taken. Raises
    FileContentError for bytes that are no image in one of ``FORMATS``, are damaged, or hold too many pixels.
    """
    try:
        with warnings.catch_warnings():
            # Remarks on metadata would fill the screen. Between its limit and twice its limit Pillow only warns.
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                _check_depth(image.mode)
                upright = ImageOps.exif_transpose(image)
                return _array(upright.convert("L" if image.mode in _GREY else "RGB"))
    except (FileContentError, MemoryError):
        raise
    except Image.UnidentifiedImageError as error:
        raise FileContentError(f"it is no image in the formats {', '.join(FORMATS)}") from error
    except Exception as error:
        # Decoders raise a dozen kinds for damaged bytes: OSError, SyntaxError, struct.error, IndexError and others.
        raise FileContentError((str(error) or type(error).__name__).splitlines()[0]) from error


def fit_image(pixels: np.ndarray, *, size: tuple[int, int] | None, channels: int | None) -> np.ndarray:
    """Return pixels [H, W, C] with ``channels`` and in ``size``, each unchanged if None.

    To change the size, the image is scaled (bicubic, ratio kept) until it just covers ``size``, and its centre is cut
    out. Raises FileContentError if the scaled image would exceed Pillow's limit on pixels.
    """
    if channels not in (None, pixels.shape[2]):
        pixels = _array(_image(pixels).convert("L" if channels == 1 else "RGB"))
    if size is None:
        return pixels
    height, width = pixels.shape[:2]
    scaled = covering_size(height, width, size)
    if scaled[0] * scaled[1] > (Image.MAX_IMAGE_PIXELS or scaled[0] * scaled[1]):
        raise FileContentError(f"its sides of {height} x {width} pixels are too different to scale it to {size}")
    resized = _array(_image(pixels).resize((scaled[1], scaled[0]), Image.Resampling.BICUBIC))
    top, left = (scaled[0] - size[0]) // 2, (scaled[1] - size[1]) // 2
    return np.ascontiguousarray(resized[top : top + size[0], left : left + size[1]])


def covering_size(height: int, width: int, size: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest height and width with an image's ratio that cover ``size``; fractions are dropped."""
    if size[0] * width >= size[1] * height:
        return size[0], size[0] * width // height
    return size[1] * height // width, size[1]


def _check_depth(mode: str) -> None:
    """Raise FileContentError for a mode with more than 8 bits per value."""
    if mode.startswith(_WIDE):
        raise FileContentError(f"its pixels have more than 8 bits (mode {mode}); convert it first")


def _image(pixels: np.ndarray) -> Image.Image:
    if pixels.shape[2] == 1:
        return Image.fromarray(pixels[:, :, 0])
    return Image.fromarray(pixels)


def _array(image: Image.Image) -> np.ndarray:
    found = np.array(image, np.uint8)
    return found.reshape((*found.shape[:2], -1))
