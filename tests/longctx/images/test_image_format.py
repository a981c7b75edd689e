"""Formats of images: palettes against a plain search, and files that are damaged or contradict themselves."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longctx.errors import DataError
from longctx.images.image_format import MOST_COLORS, ImageFormat, to_units

GREY = ImageFormat(height=3, width=5, channels=1, classes=("cat", "dog"))


def plain_search(pixels: np.ndarray, palette: np.ndarray) -> np.ndarray:
    """The nearest color of each pixel, one at a time, with the differences squared and added channel by channel."""
    nearest = np.empty(pixels.shape[:-1], np.int64)
    for place in np.ndindex(nearest.shape):
        best = None
        for number, color in enumerate(palette):
            distance = 0.0
            for value, part in zip(pixels[place], color, strict=True):
                distance += (value / 127.5 - 1 - part) ** 2
            if best is None or distance < best:
                best, nearest[place] = distance, number
    return nearest


def with_palette(palette: np.ndarray, height: int = 3, width: int = 5) -> ImageFormat:
    colors = tuple(tuple(color) for color in palette.tolist())
    return ImageFormat(height=height, width=width, channels=palette.shape[1], palette=colors)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from((1, 3)), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_each_pixel_gets_the_nearest_color(channels: int, colors: int, seed: int):
    random = np.random.default_rng(seed)
    palette = random.uniform(-1, 1, (colors, channels))
    pixels = random.integers(0, 256, (4, 3, channels), dtype=np.uint8)
    ids = with_palette(palette).quantize(pixels)
    assert ids.shape == (4, 3)
    assert (ids == plain_search(pixels, palette)).all()


def test_the_lowest_id_wins_a_tie():
    # 255 is 1.0, as near to 0.5 as to 1.5, and 0 is -1.0.
    twice = np.array([[1.5], [0.5], [-1.0], [0.5], [-1.0]])
    assert with_palette(twice).quantize(np.array([[255], [191], [0]], np.uint8)).tolist() == [0, 1, 2]


def test_many_colors_are_searched_in_pieces(monkeypatch: pytest.MonkeyPatch):
    random = np.random.default_rng(1)
    found = with_palette(random.uniform(-1, 1, (300, 3)))
    pixels = random.integers(0, 256, (50, 40, 3), dtype=np.uint8)
    whole = found.quantize(pixels)
    monkeypatch.setattr("longctx.images.image_format._DISTANCES", 700)
    assert (found.quantize(pixels) == whole).all()
    assert whole.dtype == np.uint16


@given(st.integers(0, 2**32 - 1))
def test_colors_of_a_palette_of_bytes_are_themselves(seed: int):
    colors = np.random.default_rng(seed).integers(0, 256, (17, 3), dtype=np.uint8)
    found = with_palette(to_units(np.unique(colors, axis=0)))
    ids = found.quantize(colors)
    assert (found.colors_of(ids) == colors).all()


def test_pixels_come_back_in_their_shape():
    values = np.arange(15, dtype=np.uint8)
    assert (GREY.pixels_of(values) == values.reshape(3, 5, 1)).all()
    colored = with_palette(to_units(np.array([[0, 10, 20], [255, 0, 255]])))
    pixels = colored.pixels_of(np.array([0, 1] * 7 + [0]))
    assert pixels.shape == (3, 5, 3)
    assert pixels[0, 1].tolist() == [255, 0, 255]
    assert (GREY.num_tokens, colored.num_tokens) == (15, 15)
    assert ImageFormat(height=3, width=5, channels=3).num_tokens == 45


def test_a_format_is_read_as_it_was_written():
    for found in (GREY, with_palette(np.random.default_rng(0).uniform(-1, 1, (6, 3)))):
        assert ImageFormat.from_json(found.content(), "image.json") == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"height": 0}, "height=0 is not an integer from 1"),
        ({"width": 2.0}, "width=2.0 is not an integer"),
        ({"channels": 2}, "channels=2 must be 1"),
        ({"version": 2}, "version=2"),
        ({"format": "longctx-shards"}, "is none of longctx-image"),
        ({"depth": 3}, "unknown key"),
        ({"classes": ["a", "b", "a"]}, "class 'a' is listed twice"),
        ({"classes": ["a\x1b[31m"]}, "printable name"),
        ({"palette": [[0.0, 0.0, 0.0]]}, "does not have 1 finite numbers"),
        ({"palette": [[0]] * (MOST_COLORS + 1)}, "expected 0 to 65535"),
    ],
)
def test_a_file_that_contradicts_itself_is_refused(change: dict, message: str):
    content = json.dumps(GREY.to_json() | change).encode()
    with pytest.raises(DataError, match=f"image.json.*{message}"):
        ImageFormat.from_json(content, "image.json")


def test_a_damaged_file_is_refused():
    for content in (b"", b"{", b"[]", GREY.content()[:-10], b'{"format": "longctx-image", "version": 1}'):
        with pytest.raises(DataError, match=r"image\.json is not an image format"):
            ImageFormat.from_json(content, "image.json")


def test_a_palette_is_needed_for_colors():
    with pytest.raises(DataError, match=r"no palette\. Build them with --palette"):
        GREY.quantize(np.zeros((2, 2, 1), np.uint8))
