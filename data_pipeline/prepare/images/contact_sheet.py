"""Contact sheets: a grid of small images with a name below each, as a PNG file."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from PIL import Image, ImageDraw, ImageFont

_COLUMNS = 8
_CELL, _GAP = 128, 8
"""Pixels of a square cell, and between cells."""
_FONT_PIXELS, _LINE = 13, 20
"""Font size, and height of a line with a name."""
_BACKGROUND, _INK = (255, 255, 255), (40, 40, 40)


def draw_sheet(images: Sequence[np.ndarray], names: Sequence[str], title: str) -> bytes:
    """Return the PNG file of a sheet; ``images`` are uint8 [H, W, C], and ``names`` stand below them.

    Small images are enlarged by a whole factor, so that each pixel stays a square.
    """
    columns = min(_COLUMNS, max(len(images), 1))
    rows = -(-len(images) // columns)
    # Pillow's own font lacks most letters beyond English; this one comes with matplotlib.
    font = ImageFont.truetype(Path(mpl.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf", _FONT_PIXELS)
    width = max(columns * (_CELL + _GAP), int(font.getlength(title)) + _GAP) + _GAP
    sheet = Image.new("RGB", (width, _LINE + _GAP + rows * (_CELL + _LINE + _GAP)), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    draw.text((_GAP, _GAP // 2), title, _INK, font)
    for number, (pixels, name) in enumerate(zip(images, names, strict=True)):
        left = _GAP + number % columns * (_CELL + _GAP)
        top = _LINE + _GAP + number // columns * (_CELL + _LINE + _GAP)
        small = _fitted(pixels)
        sheet.paste(small, (left + (_CELL - small.width) // 2, top + (_CELL - small.height) // 2))
        draw.text((left + _CELL // 2, top + _CELL + 2), _shortened(name, font), _INK, font, anchor="ma")
    content = io.BytesIO()
    sheet.save(content, "PNG")
    return content.getvalue()


def _fitted(pixels: np.ndarray) -> Image.Image:
    """Return an image that fits into a cell."""
    if pixels.shape[2] == 1:
        pixels = pixels[:, :, 0]
    image = Image.fromarray(pixels).convert("RGB")
    factor = _CELL // max(image.size)
    if factor >= 1:
        return image.resize((factor * image.width, factor * image.height), Image.Resampling.NEAREST)
    image.thumbnail((_CELL, _CELL))
    return image


def _shortened(name: str, font: ImageFont.FreeTypeFont) -> str:
    """Return the name, cut so that it fits under a cell."""
    if font.getlength(name) <= _CELL:
        return name
    while name and font.getlength(f"{name}…") > _CELL:
        name = name[:-1]
    return f"{name}…"
