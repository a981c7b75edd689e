"""The benchmark of image models on drawn images: both sides see the same, and learn the same."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import images

CLASSES = 10


def drawn(count: int, side: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise with a bright row, whose place is the class."""
    random = np.random.default_rng(seed)
    labels = np.arange(count) % CLASSES
    pixels = random.integers(0, 100, (count, side, side))
    pixels[np.arange(count), labels * side // CLASSES] += 150
    return pixels.astype(np.uint8), labels.astype(np.uint8)


@pytest.fixture(scope="module")
def drawings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images under Fashion-MNIST's names."""
    folder = tmp_path_factory.mktemp("drawings")
    for split, count in (("train", 150), ("t10k", 70)):
        images.write_idx(folder, split, *drawn(count, 28, count))
    return folder


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "TEST_PIXEL_ROWS", 1)
    monkeypatch.setattr(images, "PROBE_ROWS", 2)
    torch.set_num_threads(1)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("case", ["vit", "swin", pytest.param("igpt", marks=pytest.mark.slow)])
def test_both_sides_learn_the_same(case, drawings, tmp_path):
    folders = images.prepare(tmp_path, case, drawings)
    row = images.measure(case, folders, 1, images.Size(3, 1))
    assert row["losses"]["longctx"] == pytest.approx(row["losses"]["transformers"], abs=2e-4)
    name = "bits" if case == "igpt" else "accuracy"
    assert row["longctx"][name] == pytest.approx(row["transformers"][name], abs=0.02)
    assert row["time_ratio"] > 0
    assert all(bound.figure >= 0 for bound in images.bounds([row]))
    if case == "vit":
        assert 0 <= row["accuracy_at_56"] <= 1
    if case == "igpt":
        assert 1 <= row["probe"]["layer"] <= 5
        assert set(row["tuned"]) == {"accuracy", "bits"}


@pytest.mark.usefixtures("few_rows")
def test_digits_are_small_images(tmp_path):
    (tmp_path / "digits").mkdir()
    for split, count in (("train", 130), ("test", 66)):
        images.write_idx(tmp_path / "digits", split, *drawn(count, 8, count))
    folders = images.build_folders(tmp_path / "shards", tmp_path / "digits", ("train", "test"))
    row = images.measure("digits", folders, 0, images.Size(2, 1))
    assert row["losses"]["longctx"] == pytest.approx(row["losses"]["transformers"], abs=2e-4)


@pytest.mark.parametrize("case", ["vit", "swin"])
def test_transformers_gets_the_drawn_pixels(case, drawings, tmp_path):
    folders = images.prepare(tmp_path, case, drawings)
    reader = images.Reader(case, folders, images.Size(1), 0)
    given = [images.images_of(batch, reader.model) for batch in reader.held_out(folders.test)]
    pixels, labels = drawn(70, 28, 70)
    wanted = torch.from_numpy(pixels)[:, None].float() / 127.5 - 1
    torch.testing.assert_close(torch.cat([x["pixel_values"] for x in given]), wanted, rtol=0, atol=0)
    assert torch.cat([x["labels"] for x in given]).tolist() == labels.tolist()


def test_missing_images_are_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["images", "--quick", "--only", "vit", "igpt", "--fashion", str(tmp_path)])
    assert images.main() == 2
    shown = capsys.readouterr().out
    assert shown.count("dataset-fashion-mnist") == 2
    assert "$LONGCTX_FASHION_MNIST" in shown
