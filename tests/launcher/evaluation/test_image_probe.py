"""``evaluate --tasks probe``: features against models without their last layers, and classes that can be read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from launcher.evaluation.image_probe import layer_features
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from tests.helpers import run_distributed
from tests.launcher.cli.calls import refused, succeed
from tests.launcher.image_models import NAMES, write_images, write_model
from tests.longctx.image_samples import COLORS, PATCHES, igpt_config, image_stream, swin_config, vit_config
from tests.longctx.samples import randomize

COUNT = 40
MODELS: dict[str, ModelConfig] = {
    "class token": vit_config(num_layers=3),
    "pixels": igpt_config(num_layers=3),
    "masked pixels": igpt_config(causal=False),
    "one block for all layers": igpt_config(num_layers=3, shared_layers=True, num_experts=0, shared_ffn_size=0),
}


def random_model(config: ModelConfig) -> Decoder:
    model = Decoder(config, seed=None)
    randomize(model, std=0.2)
    return model.eval()


@torch.no_grad()
@pytest.mark.parametrize("name", list(MODELS))
def test_features_are_what_a_shorter_model_returns(name):
    model, count = random_model(MODELS[name]), 5
    stream, _, _ = image_stream(model.config, count)
    features = layer_features(model, stream)
    assert len(features) == model.config.num_layers + 1
    for number, found in enumerate(features):
        layers = min(number + 1, model.config.num_layers)
        short = Decoder(replace(model.config, num_layers=layers), seed=None).eval()
        short.load_state_dict({key: model.state_dict()[key] for key in short.state_dict()})
        if number < model.config.num_layers:
            short.model.norm = torch.nn.Identity()
        hidden = short(stream.tokens, stream.positions, stream.documents, pixels=stream.pixels)
        torch.testing.assert_close(found, hidden.view(count, -1, hidden.shape[-1]).mean(1))


@torch.no_grad()
def test_stages_have_features_of_their_widths():
    model = random_model(swin_config())
    stream, _, _ = image_stream(model.config, 3)
    assert stream.pixels is not None
    features = layer_features(model, stream)
    assert [found.shape for found in features] == [(3, 32)] * 2 + [(3, 64)] * 4
    # The images in another order: every image's features stay its own.
    turned = replace(stream, pixels=stream.pixels.view(3, 72, -1)[[2, 0, 1]].view_as(stream.pixels))
    for found, other in zip(features, layer_features(model, turned), strict=True):
        torch.testing.assert_close(other, found[[2, 0, 1]])


def bright_images(seed: int, shape: tuple[int, ...], most: int) -> tuple[np.ndarray, np.ndarray]:
    """Noise around a brightness by class; the classes one after the other, as in a build from folders."""
    random, labels = np.random.default_rng(seed), np.arange(COUNT) * len(NAMES) // COUNT
    middle = (labels + 1) * most // (len(NAMES) + 1)
    noise = random.integers(0, max(2, most // 60), (COUNT, *shape))
    return (middle.reshape(-1, *[1] * len(shape)) + noise).astype(np.uint8), labels


def written(folder: Path, config: ModelConfig) -> list[object]:
    """A model, a folder to fit and one to measure on; return the command."""
    image = config.image
    shape, most, colors = (image.height, image.width), COLORS - 1, COLORS
    if image.patch:
        shape, most, colors = (*shape, image.channels), 255, 0
    for seed, name in enumerate(("fit", "data")):
        write_images(folder / name, *bright_images(seed, shape, most), colors=colors)
    write_model(folder / "model", config, folder / "data")
    words = ["evaluate", "--tasks", "probe", "--checkpoint", folder / "model", "--output", folder / "out"]
    return [*words, "--data", folder / "data", "--fit-data", folder / "fit", "--chunk-tokens", "100"]


@pytest.mark.parametrize("config", [vit_config(classes=7), igpt_config(), swin_config()])
def test_classes_that_the_images_show_are_read(capsys, tmp_path, config):
    words = written(tmp_path, config)
    scores = json.loads(succeed(capsys, *words, "--json"))
    assert scores == json.loads((tmp_path / "out/probe.json").read_text())
    names = [*(f"block {number + 1}" for number in range(config.num_layers)), "last norm"]
    assert [layer["layer"] for layer in scores["layers"]] == names
    assert scores["best_accuracy"] == max(layer["accuracy"] for layer in scores["layers"])
    assert scores["layers"][0]["accuracy"] == 1.0
    assert scores["best_layer"] == "block 1"
    # Images at equal distances are of all classes.
    few = json.loads(succeed(capsys, *words, "--limit", "10", "--json"))
    assert (few["images"], few["fit_images"]) == (10, 10)
    assert few["best_accuracy"] == 1.0
    assert "best layer" in succeed(capsys, *words)


def test_what_cannot_be_probed_is_said(capsys, tmp_path, shards):
    config = vit_config(replace(PATCHES, class_token=False), class_pool="mean", max_positions=15)
    words = written(tmp_path, config)
    without, images = words[:7], bright_images(2, (6, 10, 3), 255)
    assert "--fit-data FOLDER" in refused(capsys, 2, *without, "--data", tmp_path / "data")
    both = ["--data", tmp_path / "data", "--fit-data"]
    assert "are the same images" in refused(capsys, 2, *without, *both, tmp_path / "data")
    assert "contains texts" in refused(capsys, 2, *without, *both, shards)
    write_images(tmp_path / "renamed", *images, classes=NAMES[::-1])
    assert "(eel, dog, cat, bee, …)" in refused(capsys, 2, *without, *both, tmp_path / "renamed")
    write_images(tmp_path / "unlabelled", images[0])
    assert "have no labels" in refused(capsys, 2, *without, *both, tmp_path / "unlabelled")
    write_images(tmp_path / "grey", images[0][..., :1], images[1])
    assert "1 channel" in refused(capsys, 2, *without, *both, tmp_path / "grey")
    assert "at least 1" in refused(capsys, 2, *words, "--limit", "0")
    said = refused(capsys, 2, "evaluate", "--tasks", "classes", *words[3:])
    assert "--fit-data: for probe" in said
    assert not (tmp_path / "out").exists()


def test_ranks_are_refused(tmp_path):
    words = written(tmp_path, igpt_config())
    run_distributed(call_on_ranks, 2, [str(word) for word in words], timeout=100.0)


def call_on_ranks(words: list[str]) -> None:
    from launcher.cli import main

    assert main(words) == 2
