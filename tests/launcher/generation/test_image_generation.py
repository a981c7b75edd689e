"""``generate --image``: the pixels in the sheet against full forward passes, over ranks, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from longctx.model.decoder import Decoder
from tests.data_pipeline.made_images import png
from tests.helpers import run_distributed
from tests.launcher.cli.calls import refused, succeed
from tests.launcher.image_models import palette_of, write_images, write_model
from tests.longctx.image_samples import COLORS, igpt_config, vit_config
from tests.longctx.samples import tiny_config

HEIGHT, WIDTH = 3, 5
DENSE = {"num_experts": 0, "shared_ffn_size": 0}
GREYS = np.rint((np.array(palette_of(COLORS))[:, 0] + 1) * 127.5).astype(int)


@pytest.fixture
def model(tmp_path: Path) -> Decoder:
    """A checkpoint of Image GPT, its images, and a picture of its size and colors."""
    ids = np.random.default_rng(3).integers(0, COLORS, (6, HEIGHT, WIDTH), np.uint8)
    write_images(tmp_path / "data", ids, colors=COLORS)
    (tmp_path / "picture.png").write_bytes(png(GREYS[ids[2]].astype(np.uint8)[..., None]))
    return write_model(tmp_path / "model", igpt_config(), tmp_path / "data")


def words(folder: Path, output: str, *more: object, image: bool = True) -> list[object]:
    picture = ["--image", folder / "picture.png"] if image else ["--data", folder / "data"]
    return ["generate", "--checkpoint", folder / "model", *picture, "--output", folder / output, *more]


def drawn(file: Path, count: int) -> list[np.ndarray]:
    """The ids in each cell of a sheet; -1 for grey rows."""
    sheet, factor = np.array(Image.open(file).convert("L")), 128 // max(HEIGHT, WIDTH)
    found = []
    for number in range(count):
        left = 8 + number * 136 + (128 - factor * WIDTH) // 2
        top = 28 + (128 - factor * HEIGHT) // 2
        centres = sheet[
            top + factor // 2 + factor * np.arange(HEIGHT)[:, None], left + factor // 2 + factor * np.arange(WIDTH)
        ]
        ids = np.full(centres.shape, -1)
        for color, grey in enumerate(GREYS):
            ids[centres == grey] = color
        found.append(ids)
    return found


@torch.no_grad()
def greedy(model: Decoder, given: list[int]) -> list[int]:
    """The likeliest colors after the given ones, each by a full forward pass."""
    ids = list(given)
    while len(ids) < HEIGHT * WIDTH:
        tokens = torch.tensor([[COLORS, *ids]])
        logits = model.logits(model(tokens, torch.arange(tokens.shape[1])[None]))[0, -1]
        ids.append(int(logits[:COLORS].argmax()))
    return ids


@pytest.mark.parametrize(("rows", "options"), [(1, []), (2, ["--image-rows", "2"]), (0, ["--image-rows", "0"])])
def test_pixels_are_the_likeliest_after_all_before_them(capsys, tmp_path, model, rows, options):
    out = succeed(capsys, *words(tmp_path, "out.png", *options))
    assert out == f"{tmp_path / 'out.png'}\n"
    original, given, continued = drawn(tmp_path / "out.png", 3)
    stored = np.random.default_rng(3).integers(0, COLORS, (6, HEIGHT, WIDTH), np.uint8)[2]
    assert (original == stored).all()
    assert (given[:rows] == stored[:rows]).all()
    assert (given[rows:] == -1).all()
    assert continued.flatten().tolist() == greedy(model, stored[:rows].flatten().tolist())


def test_an_image_of_a_folder_is_continued_like_its_file(capsys, tmp_path, model):
    succeed(capsys, *words(tmp_path, "file.png"))
    succeed(capsys, *words(tmp_path, "folder.png", "--image-number", "2", image=False))
    file, folder = (drawn(tmp_path / name, 3) for name in ("file.png", "folder.png"))
    assert all((a == b).all() for a, b in zip(file, folder, strict=True))


def test_each_sample_has_its_seed(capsys, tmp_path, model):
    sampled = ["--temperature", "1", "--top-k", "7"]
    succeed(capsys, *words(tmp_path, "two.png", *sampled, "--samples", "2", "--seed", "5"))
    succeed(capsys, *words(tmp_path, "one.png", *sampled, "--seed", "6"))
    _, _, first, second = drawn(tmp_path / "two.png", 4)
    assert (first != second).any()
    assert (second == drawn(tmp_path / "one.png", 3)[2]).all()


def test_ids_beyond_the_palette_are_never_drawn(capsys, tmp_path, model):
    """A padded vocabulary without a head of its own size, at a temperature that makes all ids about equal."""
    config = igpt_config(vocab_size=60, output_vocab_size=0)
    padded = write_model(tmp_path / "padded", config, tmp_path / "data")
    (tmp_path / "model").rename(tmp_path / "other")
    (tmp_path / "padded").rename(tmp_path / "model")
    succeed(capsys, *words(tmp_path, "hot.png", "--temperature", "1000", "--samples", "3"))
    samples = np.stack(drawn(tmp_path / "hot.png", 5)[2:])
    assert samples.min() >= 0
    assert len(np.unique(samples)) > COLORS // 2
    succeed(capsys, *words(tmp_path, "greedy.png"))
    original, _, continued = drawn(tmp_path / "greedy.png", 3)
    assert continued.flatten().tolist() == greedy(padded, original[:1].flatten().tolist())


def test_ranks_draw_what_one_process_does(capsys, tmp_path, model):
    succeed(capsys, *words(tmp_path, "one.png"))
    run_distributed(draw_on_ranks, 2, [str(word) for word in words(tmp_path, "two.png")], timeout=100.0)
    assert (tmp_path / "two.png").read_bytes() == (tmp_path / "one.png").read_bytes()


def draw_on_ranks(call: list[str]) -> None:
    from launcher.cli import main

    assert main(call) == 0


def test_other_sizes_and_channels_are_converted(capsys, tmp_path, model):
    pixels = np.repeat(np.repeat(GREYS[np.arange(15).reshape(3, 5) % COLORS], 40, 0), 40, 1)
    (tmp_path / "picture.png").write_bytes(png(np.repeat(pixels[..., None], 3, 2).astype(np.uint8)))
    succeed(capsys, *words(tmp_path, "out.png"))
    # Scaled with some blur between colors.
    assert np.abs(drawn(tmp_path / "out.png", 1)[0] - np.arange(15).reshape(3, 5) % COLORS).max() <= 2


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--image-rows", "3"], "from 0 to 2"),
        (["--samples", "2"], "would all be equal"),
        (["--samples", "0"], "at least 1"),
        (["--beams", "2"], "--beams"),
        (
            ["--max-new-tokens", "2", "--stop", "a", "--chat-template", "auto"],
            "--max-new-tokens, --chat-template, --stop",
        ),
        (["--image-number", "1"], "not --image"),
        (["--data", "x"], "one picture"),
        (["--temperature", "-1"], "temperature"),
    ],
)
def test_options_without_sense_are_refused(capsys, tmp_path, model, more, said):
    assert said in refused(capsys, 2, *words(tmp_path, "out.png", *more))
    assert not (tmp_path / "out.png").exists()


def test_bad_pictures_are_refused(capsys, tmp_path, model, shards):
    assert "from 0 to 5" in refused(capsys, 2, *words(tmp_path, "out.png", "--image-number", "6", image=False))
    (tmp_path / "picture.png").write_bytes(b"no picture")
    assert "not a readable picture" in refused(capsys, 2, *words(tmp_path, "out.png"))
    (tmp_path / "picture.png").unlink()
    assert "cannot be read" in refused(capsys, 2, *words(tmp_path, "out.png"))
    asked = ["generate", "--checkpoint", tmp_path / "model"]
    said = refused(capsys, 2, *asked, "--data", shards, "--output", tmp_path / "out.png")
    assert "contains texts" in said
    assert "as PNG" in refused(capsys, 2, *asked, "--data", tmp_path / "data", "--output", tmp_path / "out.jpg")
    assert "--output is missing" in refused(capsys, 2, *asked, "--data", tmp_path / "data")


def test_models_that_draw_nothing_are_refused(capsys, tmp_path, model):
    models = {
        "patches": (vit_config(), "reads patches"),
        "head": (
            igpt_config(**DENSE, classes=5, class_pool="mean", token_head=False, output_vocab_size=0),
            "token_head=false",
        ),
        "masked": (igpt_config(causal=False), "causal=false"),
        "texts": (tiny_config(), "reads texts"),
    }
    for name, (config, said) in models.items():
        write_model(tmp_path / name, config, tmp_path / "data")
        asked = words(tmp_path, "out.png")
        asked[2] = tmp_path / name
        assert said in refused(capsys, 2, *asked), name


def test_a_prompt_for_an_image_model_is_refused(capsys, tmp_path, model):
    asked = ["generate", "--checkpoint", tmp_path / "model"]
    assert "--image FILE.png" in refused(capsys, 2, *asked)
    assert "--image FILE.png" in refused(capsys, 2, *asked, "--max-new-tokens", "3")
    assert "--image FILE.png" in refused(capsys, 2, *asked, "--prompt", "a", "--max-new-tokens", "3")
    assert "--samples: for pictures" in refused(capsys, 2, *asked, "--prompt", "a", "--samples", "3")
