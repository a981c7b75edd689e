"""Palettes: against plain k-means steps, colors that are known, and samples that are too small."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_pipeline.prepare.images import fit_palette as module
from data_pipeline.prepare.images.fit_palette import fit_palette
from longctx.errors import DataError


def plain_steps(pixels: np.ndarray, colors: np.ndarray, steps: int) -> np.ndarray:
    """Lloyd's steps over all pixels, one by one."""
    for _ in range(steps):
        nearest = [int(np.argmin([((pixel - color) ** 2).sum() for color in colors])) for pixel in pixels.astype(float)]
        colors = np.array(
            [
                pixels[np.array(nearest) == number].mean(axis=0) if number in nearest else colors[number]
                for number in range(len(colors))
            ]
        )
    return colors


@settings(max_examples=15, deadline=None)
@given(st.sampled_from((1, 3)), st.integers(2, 5), st.integers(0, 2**32 - 1))
def test_steps_are_those_of_lloyd(channels: int, count: int, seed: int):
    pixels = np.random.default_rng(seed).integers(0, 256, (40, channels), dtype=np.uint8)
    points, weights = np.unique(pixels, axis=0, return_counts=True)
    start = module._first_colors(points, weights, count)
    assert len(np.unique(start, axis=0)) == count
    assert {tuple(color) for color in start} <= {tuple(point) for point in points.astype(float)}
    wanted = plain_steps(pixels, start, module._STEPS)
    found = fit_palette(pixels, count)
    assert np.allclose(found.colors, wanted[np.lexsort(wanted.T[::-1])])
    distances = ((pixels[:, None].astype(float) - found.colors) ** 2).sum(axis=2).min(axis=1)
    assert np.isclose(found.error, distances.sum() / pixels.size)


def test_distinct_colors_are_found_exactly():
    colors = np.random.default_rng(0).integers(0, 256, (20, 3), dtype=np.uint8)
    pixels = np.repeat(colors, np.arange(1, 21), axis=0)
    found = fit_palette(pixels, 20)
    assert found.error == 0
    assert found.colors.tolist() == np.unique(colors, axis=0).tolist()


def test_clusters_far_from_each_other_are_found():
    random = np.random.default_rng(1)
    centres = np.array([[20, 20, 20], [230, 20, 20], [20, 230, 20], [20, 20, 230]])
    noise = random.integers(-5, 6, (4, 500, 3))
    found = fit_palette((centres[:, None] + noise).reshape(-1, 3).astype(np.uint8), 4)
    assert np.abs(np.sort(found.colors, axis=0) - np.sort(centres, axis=0)).max() < 1


def test_the_order_of_pixels_and_the_size_of_pieces_do_not_matter(monkeypatch: pytest.MonkeyPatch):
    pixels = np.random.default_rng(2).integers(0, 256, (3000, 3), dtype=np.uint8)
    found = fit_palette(pixels, 30)
    assert fit_palette(pixels[::-1], 30).colors.tobytes() == found.colors.tobytes()
    monkeypatch.setattr(module, "_DISTANCES", 1000)
    assert fit_palette(pixels, 30).colors.tobytes() == found.colors.tobytes()


def test_too_few_colors_name_the_most():
    pixels = np.array([[1], [2], [2], [9]], np.uint8)
    with pytest.raises(DataError, match=r"--palette 5 needs as many distinct colors.* has 3. Try --palette 3"):
        fit_palette(pixels, 5)
    assert fit_palette(pixels, 3).error == 0


@pytest.mark.parametrize("count", [-3, 0, 1, 65_536])
def test_sizes_out_of_range(count: int):
    with pytest.raises(DataError, match=f"--palette {count} must be from 2 to 65535"):
        fit_palette(np.zeros((4, 1), np.uint8), count)
