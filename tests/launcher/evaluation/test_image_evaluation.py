"""``evaluate --tasks classes`` and ``pixels``: against plain torch, over ranks, and what does not fit."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from longctx.architecture.image import ImageShape
from longctx.config import ModelConfig
from longctx.model.decoder import Decoder
from tests.helpers import run_distributed
from tests.launcher.cli.calls import refused, succeed
from tests.launcher.image_models import NAMES, write_images, write_model
from tests.longctx.image_samples import COLORS, PATCHES, igpt_config, patches_of, swin_config, vit_config
from tests.longctx.samples import tiny_config

DENSE: dict[str, Any] = {"num_experts": 0, "shared_ffn_size": 0}
MODELS: dict[str, ModelConfig] = {
    "class token": vit_config(),
    "means": vit_config(replace(PATCHES, class_token=False), **DENSE, class_pool="mean", max_positions=15),
    "windows": swin_config(),
    # 27 tokens, so that ranks pad a batch by complete images.
    "odd windows": swin_config(
        ImageShape(height=6, width=18, channels=1, patch=2, window=3, depths=(2,)), num_layers=2
    ),
    "pixels and classes": igpt_config(**DENSE, classes=5, class_pool="mean"),
    "classes of pixels": igpt_config(**DENSE, classes=5, class_pool="mean", token_head=False, output_vocab_size=0),
}
COUNT = 23
"""Images: batches of 9 leave a short one."""


def images_for(config: ModelConfig, seed: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Random pixels [N, H, W, C], or ids [N, H, W]; and classes."""
    image, random = config.image, np.random.default_rng(seed)
    shape = (COUNT, image.height, image.width)
    pixels = random.integers(0, COLORS, shape, np.uint8)
    if image.patch:
        pixels = random.integers(0, 256, (*shape, image.channels), np.uint8)
    return pixels, random.integers(0, 5, COUNT)


def written(folder: Path, config: ModelConfig) -> tuple[Decoder, np.ndarray, np.ndarray]:
    """A checkpoint and a folder of images."""
    pixels, labels = images_for(config)
    write_images(folder / "data", pixels, labels, colors=0 if config.image.patch else COLORS)
    return write_model(folder / "model", config, folder / "data"), pixels, labels


def words(folder: Path, task: str, *more: object, output: str = "out") -> list[object]:
    given = ["--checkpoint", folder / "model", "--data", folder / "data", "--output", folder / output]
    return ["evaluate", *given, "--tasks", task, "--chunk-tokens", "150", *more]


@torch.no_grad()
def hidden_of(model: Decoder, pixels: np.ndarray) -> torch.Tensor:
    """The last hidden states [T, M] of one image, read alone."""
    image = model.config.image
    if image.patch:
        tokens = patches_of(torch.from_numpy(pixels).permute(2, 0, 1)[None], image)[None]
        positions = torch.arange(tokens.shape[1])[None]
        found = model(torch.zeros_like(positions), positions, pixels=tokens)
        return found.hidden_BtM[0] if image.depths else found[0]
    ids = torch.from_numpy(pixels).long().flatten()
    if model.config.predicts_tokens and model.config.causal:
        ids = torch.cat([torch.tensor([COLORS]), ids[:-1]])
    return model(ids[None], torch.arange(len(ids))[None])[0]


@torch.no_grad()
def class_logits(model: Decoder, images: np.ndarray) -> torch.Tensor:
    pooled = []
    for pixels in images:
        hidden = hidden_of(model, pixels)
        pooled.append(hidden.mean(0) if model.config.class_pool == "mean" else hidden[0])
    return model.class_head.out(torch.stack(pooled))


@pytest.mark.parametrize("name", list(MODELS))
def test_classes_are_scored_like_plain_logits(capsys, tmp_path, name):
    model, images, labels = written(tmp_path, MODELS[name])
    scores = json.loads(succeed(capsys, *words(tmp_path, "classes", "--json")))
    assert scores == json.loads((tmp_path / "out/classes.json").read_text())
    logits, target = class_logits(model, images), torch.from_numpy(labels)
    predicted = logits.argmax(1)
    assert scores["images"] == COUNT
    assert scores["nll"] == pytest.approx(float(-logits.log_softmax(1)[range(COUNT), target].mean()), rel=1e-5)
    assert scores["accuracy"] == pytest.approx(float((predicted == target).double().mean()))
    assert scores["top_5_accuracy"] == 1.0
    wrong = Counter((a, b) for a, b in zip(labels.tolist(), predicted.tolist(), strict=True) if a != b)
    most = sorted(wrong.items(), key=lambda item: (-item[1], item[0]))[:5]
    assert scores["confusions"] == [{"class": NAMES[a], "predicted": NAMES[b], "images": n} for (a, b), n in most]


def test_the_first_five_of_more_classes_count(capsys, tmp_path):
    config, names = vit_config(**DENSE, classes=9), tuple("abcdefghi")
    pixels, _ = images_for(config)
    labels = np.arange(COUNT) % 9
    write_images(tmp_path / "data", pixels, labels, classes=names)
    model = write_model(tmp_path / "model", config, tmp_path / "data")
    scores = json.loads(succeed(capsys, *words(tmp_path, "classes", "--json")))
    ranks = (class_logits(model, pixels).argsort(1, descending=True) == torch.from_numpy(labels)[:, None]).nonzero()
    assert scores["top_5_accuracy"] == pytest.approx(float((ranks[:, 1] < 5).double().mean()))
    assert scores["accuracy"] < scores["top_5_accuracy"] < 1


def test_a_limit_takes_images_at_equal_distances(capsys, tmp_path):
    model, images, labels = written(tmp_path, MODELS["means"])
    scores = json.loads(succeed(capsys, *words(tmp_path, "classes", "--limit", "5", "--json")))
    chosen = [0, 4, 9, 13, 18]
    logits = class_logits(model, images[chosen])
    want = -logits.log_softmax(1)[range(5), torch.from_numpy(labels[chosen])].mean()
    assert scores["nll"] == pytest.approx(float(want), rel=1e-5)


@pytest.mark.parametrize("name", ["class token", "windows", "odd windows", "pixels and classes"])
def test_ranks_score_what_one_process_does(tmp_path, name, capsys):
    written(tmp_path, MODELS[name])
    tasks = ["classes", *(["pixels"] if name == "pixels and classes" else [])]
    calls = []
    for task in tasks:
        succeed(capsys, *words(tmp_path, task, output="one"))
        # Ranks that share each batch, then ranks with batches of their own.
        calls += [words(tmp_path, task, output="shared")]
        calls += [words(tmp_path, task, "--parallel.context", "1", output="own")]
    run_distributed(call_on_ranks, 2, [[str(word) for word in call] for call in calls], timeout=100.0)
    for task in tasks:
        want, *found = (json.loads((tmp_path / f"{way}/{task}.json").read_text()) for way in ("one", "shared", "own"))
        for scores in found:
            numbers = {key: value for key, value in scores.items() if isinstance(value, float)}
            assert numbers == pytest.approx({key: want[key] for key in numbers}, rel=1e-5)
            assert {k: v for k, v in scores.items() if k not in numbers} == {
                k: want[k] for k in want if k not in numbers
            }


def call_on_ranks(calls: list[list[str]]) -> None:
    from launcher.cli import main

    for call in calls:
        assert main(call) == 0


@torch.no_grad()
def test_pixels_are_scored_in_bits(capsys, tmp_path):
    model, images, _ = written(tmp_path, igpt_config())
    scores = json.loads(succeed(capsys, *words(tmp_path, "pixels", "--json")))
    nll = 0.0
    for pixels in images:
        logits = model.logits(hidden_of(model, pixels)[None])[0].double()
        nll -= float(logits.log_softmax(1)[range(15), torch.from_numpy(pixels).long().flatten()].sum())
    shares = np.bincount(images.flatten()) / images.size
    assert scores["pixels"] == images.size
    assert scores["bits_per_pixel"] == pytest.approx(nll / math.log(2) / images.size, rel=1e-5)
    assert scores["unigram_bits_per_pixel"] == pytest.approx(-sum(p * math.log2(p) for p in shares if p))


def test_masked_pixels_are_scored_in_bits(capsys, tmp_path):
    written(tmp_path, igpt_config(causal=False))
    scores = json.loads(succeed(capsys, *words(tmp_path, "pixels", "--json")))
    assert 0.05 < scores["masked_pixels"] / (COUNT * 15) < 0.3
    assert scores["bits_per_pixel"] > scores["unigram_bits_per_pixel"]
    assert json.loads(succeed(capsys, *words(tmp_path, "pixels", "--json"))) == scores


def test_what_does_not_fit_is_said(capsys, tmp_path):
    pixels, labels = images_for(MODELS["means"])
    model, data = tmp_path / "model", tmp_path / "data"
    write_images(data, pixels, labels)
    write_model(model, MODELS["means"], data)
    for name, changed, said in (
        ("grey", {"images": pixels[..., :1]}, "1 channel (grey)"),
        ("small", {"images": pixels[:, :5]}, "5 × 10 pixels"),
        ("unlabelled", {"labels": None}, "have no labels"),
        ("three", {"labels": labels % 3, "classes": NAMES[:3]}, "3 classes"),
        ("renamed", {"classes": ("ant", "cat", "bee", "dog", "eel")}, "class 1 is 'cat'"),
        ("palette", {"images": pixels[..., 0], "colors": 256}, "colors of a palette of 256"),
    ):
        write_images(tmp_path / name, **{"images": pixels, "labels": labels, **changed})
        words = ["evaluate", "--tasks", "classes", "--checkpoint", model, "--output", tmp_path / "out"]
        assert said in refused(capsys, 2, *words, "--data", tmp_path / name), name
    assert "--data FOLDER" in refused(capsys, 2, *words)
    assert "does not exist" in refused(capsys, 2, *words, "--data", tmp_path / "none")
    assert "at least 1" in refused(capsys, 2, *words, "--data", data, "--limit", "0")
    assert "classes runs alone" in refused(capsys, 2, *words[:2], "classes,pixels", *words[3:])
    assert "--lengths: for" in refused(capsys, 2, *words, "--data", data, "--lengths", "5")
    assert not (tmp_path / "out").exists()


def test_a_label_beyond_the_classes_is_found(capsys, tmp_path):
    pixels, labels = images_for(MODELS["means"])
    write_images(tmp_path / "data", pixels, [*labels[:-1], 5])
    write_model(tmp_path / "model", MODELS["means"], tmp_path / "data")
    assert "has label 5" in refused(capsys, 1, *words(tmp_path, "classes"))


def test_tasks_need_their_models(capsys, tmp_path, shards):
    written(tmp_path, vit_config(**DENSE))
    assert "reads patches" in refused(capsys, 2, *words(tmp_path, "pixels"))
    texts = words(tmp_path, "niah", "--lengths", "64")
    assert "reads images" in refused(capsys, 2, *texts)
    assert "reads images" in refused(capsys, 2, *[word for word in words(tmp_path, "masked") if word != "150"][:-1])
    written(tmp_path / "igpt", igpt_config())
    assert "model.classes=0" in refused(capsys, 2, *words(tmp_path / "igpt", "classes"))
    written(tmp_path / "head", MODELS["classes of pixels"])
    assert "token_head=false" in refused(capsys, 2, *words(tmp_path / "head", "pixels"))
    output = ["--output", tmp_path / "out", "--tasks"]
    asked = ["evaluate", "--checkpoint", tmp_path / "model", "--data", shards, *output, "classes"]
    assert "contains texts" in refused(capsys, 2, *asked)
    write_model(tmp_path / "texts", tiny_config())
    assert "reads texts" in refused(capsys, 2, "evaluate", "--checkpoint", tmp_path / "texts", *output, "classes")


def test_other_palettes_are_refused(capsys, tmp_path):
    written(tmp_path, igpt_config())
    images, labels = images_for(igpt_config())
    write_images(tmp_path / "other", images % 7, labels, colors=COLORS - 1)
    asked = words(tmp_path, "pixels")
    asked[asked.index(tmp_path / "data")] = tmp_path / "other"
    assert "another palette (11 colors)" in refused(capsys, 2, *asked)


def test_a_model_without_a_format_takes_that_of_the_images(capsys, tmp_path):
    pixels, labels = images_for(MODELS["means"])
    write_images(tmp_path / "data", pixels, labels)
    write_model(tmp_path / "model", MODELS["means"])
    assert json.loads(succeed(capsys, *words(tmp_path, "classes", "--json")))["images"] == COUNT
