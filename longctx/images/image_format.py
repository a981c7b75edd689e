"""``ImageFormat``: shape, classes and palette shared by all images in a data set, and conversion to palette colors.

With a palette an image is one color id per pixel, as in Image GPT; without one it is its bytes. Colors are stored in
Hugging Face's units: value ``v`` in 0 … 255 is ``v / 127.5 - 1``, as ``clusters`` in a preprocessor_config.json.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from longctx.errors import DataError
from longctx.untrusted.strict_json import MOST_JSON_VALUES, parse_json, shown
from longctx.untrusted.untrusted_schema import NAME, choice_of, integer_between, list_of, number, record

FORMAT, VERSION = "longctx-image", 1
CHANNELS = (1, 3)
"""Grey, or red, green and blue."""
MOST_SIDE = 16_384
"""Maximum height and width in pixels."""
MOST_COLORS = (1 << 16) - 1
"""Maximum palette size: one id more, the begin token, must still fit into 16 bits."""
MOST_CLASSES = 1 << 20
_HALF_RANGE = 127.5
"""Half of the range of a value: maps 0 … 255 to -1 … 1."""
_DISTANCES = 1 << 20
"""Distances computed together: 8 MiB in float64."""
_CHECK = record(
    {
        "format": choice_of((FORMAT,)),
        "version": integer_between(VERSION, VERSION),
        "height": integer_between(1, MOST_SIDE),
        "width": integer_between(1, MOST_SIDE),
        "channels": integer_between(1, max(CHANNELS)),
        "classes": list_of(NAME, most=MOST_CLASSES),
        "palette": list_of(list_of(number, least=1, most=max(CHANNELS)), most=MOST_COLORS),
    }
)


@dataclass(frozen=True, kw_only=True)
class ImageFormat:
    """Properties shared by all images in a data set. Pixels are uint8 in the order row, column, channel."""

    height: int
    width: int
    channels: int
    """1 (grey) or 3 (red, green, blue)."""
    classes: tuple[str, ...] = ()
    """Class names in label order; empty if the images have no labels."""
    palette: tuple[tuple[float, ...], ...] = ()
    """Colors in Hugging Face's units, ``channels`` numbers each; empty if tokens are the pixels' own values."""

    def __post_init__(self) -> None:
        """Raise DataError for values that no data set can have."""
        for problem in self._problems():
            raise DataError(problem)

    @property
    def num_colors(self) -> int:
        """Palette size; 0 without a palette."""
        return len(self.palette)

    @property
    def num_ids(self) -> int:
        """Distinct tokens in stored images: palette colors, or the 256 values of a byte."""
        return self.num_colors or 256

    @property
    def num_tokens(self) -> int:
        """Tokens per image: one per pixel with a palette, otherwise one per value."""
        tokens = self.height * self.width
        if not self.palette:
            tokens *= self.channels
        return tokens

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels."""
        return self.height, self.width, self.channels

    def describe(self) -> str:
        """Return size, channels, palette and classes in a few words."""
        parts = [f"{self.height} x {self.width} pixels", "1 channel"]
        if self.channels > 1:
            parts[1] = f"{self.channels} channels"
        if self.palette:
            parts.append(f"{self.num_colors:,} palette colors")
        parts.append(f"{len(self.classes):,} classes" if self.classes else "no classes")
        return ", ".join(parts)

    def to_json(self) -> dict[str, Any]:
        """Return the JSON object to write."""
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def content(self) -> bytes:
        """Return the content of ``image.json``."""
        return json.dumps(self.to_json(), ensure_ascii=False).encode() + b"\n"

    @classmethod
    def from_json(cls, content: bytes, path: object) -> ImageFormat:
        """Parse ``image.json`` from ``path``; raise DataError if it is damaged or from another version."""
        try:
            body = parse_json(content, most_values=MOST_JSON_VALUES)
            _CHECK(body, "")
        except ValueError as error:
            raise DataError(
                f"{path} is not an image format: {error}. Use a file written by `longctx data build --kind images`."
            ) from error
        del body["format"], body["version"]
        body["classes"] = tuple(body["classes"])
        body["palette"] = tuple(tuple(float(value) for value in color) for color in body["palette"])
        try:
            return cls(**body)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def quantize(self, pixels: np.ndarray) -> np.ndarray:
        """Return the nearest color's id for each pixel in uint8 [..., C], as uint16 [...]; the lowest id wins a tie.

        Raises DataError if the format has no palette.
        """
        tables = self._squared_distances
        # Most images repeat colors, so search once per distinct color. As one integer each they sort fastest.
        values = pixels.reshape(-1, self.channels).astype(np.int64)
        shifts = 8 * np.arange(self.channels)
        packed, inverse = np.unique((values << shifts).sum(axis=1), return_inverse=True)
        distinct = (packed[:, None] >> shifts) & 255
        nearest = np.empty(len(distinct), np.uint16)
        step = max(1, _DISTANCES // self.num_colors)
        for start in range(0, len(distinct), step):
            part = distinct[start : start + step]
            # Channel by channel in a fixed order, without a matrix product: every machine rounds equally, so near ties
            # are decided equally everywhere.
            distances = tables[0, part[:, 0]]
            for channel in range(1, self.channels):
                distances = distances + tables[channel, part[:, channel]]
            nearest[start : start + step] = distances.argmin(axis=1)
        return nearest[inverse.reshape(-1)].reshape(pixels.shape[:-1])

    def colors_of(self, ids: np.ndarray) -> np.ndarray:
        """Return each id's color, uint8 [..., C]; raise DataError if the format has no palette."""
        self._require_palette()
        values = np.rint((np.array(self.palette) + 1) * _HALF_RANGE)
        return np.clip(values, 0, 255).astype(np.uint8)[ids]

    def pixels_of(self, tokens: np.ndarray) -> np.ndarray:
        """Return an image's pixels from its tokens, uint8 [H, W, C]."""
        if self.palette:
            tokens = self.colors_of(tokens)
        return tokens.reshape(self.shape).astype(np.uint8)

    @cached_property
    def _squared_distances(self) -> np.ndarray:
        """Squared distance from each channel value to each color, float64 [C, 256, colors]."""
        self._require_palette()
        values = np.arange(256) / _HALF_RANGE - 1
        colors = np.array(self.palette, np.float64).T
        return (values[None, :, None] - colors[:, None, :]) ** 2

    def _require_palette(self) -> None:
        if not self.palette:
            raise DataError("These images have no palette. Build them with --palette N, such as --palette 512.")

    def _problems(self) -> list[str]:
        """Return the contradictions between the fields."""
        problems = []
        for name in ("height", "width"):
            if not 1 <= getattr(self, name) <= MOST_SIDE:
                problems.append(f"{name}={getattr(self, name)} must be from 1 to {MOST_SIDE}.")
        if self.channels not in CHANNELS:
            problems.append(f"channels={self.channels} must be 1 (grey) or 3 (color).")
        if len(self.palette) > MOST_COLORS:
            problems.append(f"the palette has {len(self.palette)} colors; the most are {MOST_COLORS}.")
        if any(len(color) != self.channels or not all(map(math.isfinite, color)) for color in self.palette):
            problems.append(f"a palette color does not have {self.channels} finite numbers, one per channel.")
        if len(self.classes) > MOST_CLASSES:
            problems.append(f"there are {len(self.classes)} classes; the most are {MOST_CLASSES}.")
        if len(set(self.classes)) != len(self.classes):
            twice = next(name for name in self.classes if self.classes.count(name) > 1)
            problems.append(f"class {shown(twice)} is listed twice.")
        for name in self.classes:
            try:
                NAME(name, "class")
            except ValueError as error:
                problems.append(f"{error}: rename it.")
        return problems


def to_units(values: np.ndarray) -> np.ndarray:
    """Convert pixel values 0 … 255 to Hugging Face's units, float64."""
    return np.asarray(values, np.float64) / _HALF_RANGE - 1
