"""Runs that start from a model of other images or classes: positions, heads, data, and what is refused."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from launcher.checkpoint.start_weights import StartWeights
from launcher.config.config_sections import RunConfig
from launcher.config.load_config import load_run_config
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import CheckpointReader, list_checkpoints, model_config
from longctx.config import ModelConfig
from longctx.conversion import import_hf
from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.conversion.tensor_layouts import parameter_shapes
from longctx.errors import ConfigError, DataError
from longctx.images.image_format import ImageFormat
from longctx.model.decoder import Decoder
from longctx.tokenizer import load_tokenizer
from longctx.tokenizer.image_tokenizer import ImageTokenizer
from tests.data_pipeline.shards.test_image_shards import rows_of, write_images
from tests.launcher.workers import leave_out_pictures, rows, run
from tests.longctx.image_samples import COLORS, igpt_config, vit_config

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SEED = 5


def saved(config: ModelConfig, folder: Path, *, seed: int = 1) -> CheckpointReader:
    save_master_weights(
        config, Decoder(config, seed=seed).state_dict().items(), folder, dtype=torch.float32, training={}
    )
    return CheckpointReader(folder)


def started(reader: CheckpointReader, model: ModelConfig) -> tuple[StartWeights, dict[str, torch.Tensor]]:
    """Every weight of a run with this model, read in two ranges as two ranks would."""
    shapes = parameter_shapes(model)
    weights, found = StartWeights(reader, model, shapes, SEED), {}
    assert weights.stored_shapes() == shapes
    for name, shape in shapes.items():
        whole = torch.full((torch.Size(shape).numel(),), torch.nan)
        cut = len(whole) // 3
        weights.read_into(name, "master", 0, whole[:cut])
        weights.read_into(name, "master", cut, whole[cut:])
        found[name] = whole.view(shape)
    return weights, found


def of_size(config: ModelConfig, height: int, width: int, **changes: Any) -> ModelConfig:
    image = dataclasses.replace(config.image, height=height, width=width)
    return dataclasses.replace(config, image=image, max_positions=image.num_tokens, **changes)


@pytest.mark.parametrize(("height", "width"), [(16, 16), (12, 20), (4, 8), (8, 12)])
def test_positions_are_those_that_transformers_interpolates(height, width, tmp_path):
    sizes = {"hidden_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    theirs = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=8, patch_size=2))
    torch.nn.init.normal_(theirs.embeddings.position_embeddings)
    theirs.save_pretrained(tmp_path / "hf")
    import_hf(tmp_path / "hf", tmp_path / "ours", verify="none")
    reader = CheckpointReader(tmp_path / "ours")
    model = of_size(model_config(reader), height, width)
    weights, found = started(reader, model)
    assert weights.resizes
    given = torch.zeros(1, model.max_positions, 12)
    wanted = theirs.embeddings.interpolate_pos_encoding(given, height, width)[0]
    torch.testing.assert_close(found["model.embed_positions.weight"], wanted.detach(), rtol=0, atol=1e-6)
    others = [name for name in found if name != "model.embed_positions.weight"]
    assert all(torch.equal(found[name], reader.read(name)) for name in others)


def test_equal_images_keep_their_positions(tmp_path):
    config = vit_config()
    reader = saved(config, tmp_path / "c")
    weights, found = started(reader, config)
    assert not weights.resizes
    assert not weights.new
    assert not weights.unused
    assert all(torch.equal(found[name], tensor) for name, tensor in reader.state_dict(torch.float32))


def test_a_head_of_other_classes_is_new_and_depends_on_the_seed_alone(tmp_path, caplog):
    config = vit_config()
    reader = saved(config, tmp_path / "c")
    model = dataclasses.replace(config, classes=config.classes + 2)
    weights, found = started(reader, model)
    assert weights.new == ["class_head.out.weight", "class_head.out.bias"]
    fresh = Decoder(model, seed=SEED).state_dict()
    for name in weights.new:
        assert torch.equal(found[name], fresh[name])
    kept = [name for name in found if name not in weights.new]
    assert all(torch.equal(found[name], reader.read(name)) for name in kept)
    with caplog.at_level(logging.INFO):
        weights.log_changes()
    assert "The class head is new (7 classes): class_head.out.weight, class_head.out.bias." in caplog.text


def test_a_classifier_from_an_image_gpt_leaves_the_token_head_unread(tmp_path, caplog):
    causal = igpt_config()
    reader = saved(causal, tmp_path / "c")
    model = dataclasses.replace(causal, classes=4, class_pool="mean", class_bias=False, token_head=False)
    weights, found = started(reader, model)
    assert (weights.new, weights.unused) == (["class_head.out.weight"], ["lm_head.weight"])
    assert "lm_head.weight" not in found
    with caplog.at_level(logging.INFO):
        weights.log_changes()
    assert "Not read from the checkpoint, because the model has no such head: lm_head.weight." in caplog.text
    # Beside the token head, it is the only new one.
    both = dataclasses.replace(causal, classes=4, class_pool="mean")
    weights, _ = started(reader, both)
    assert (weights.new, weights.unused) == (["class_head.out.weight", "class_head.out.bias"], [])


# Whole runs.

SMALL = ImageFormat(height=8, width=8, channels=1, classes=("ankle boot", "bag", "coat"))
LARGE = dataclasses.replace(SMALL, height=16, width=16, classes=("cat", "dog", "owl", "fish"))
PALETTE = tuple((value,) for value in np.linspace(-1, 1, COLORS).tolist())
PIXELS = ImageFormat(height=4, width=6, channels=1, palette=PALETTE)
VIT: dict[str, Any] = {
    "preset": "none",
    "vocab_size": 0, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "head_dim": 8,
    "ffn_size": 24, "activation": "gelu", "norm": "layernorm", "norm_eps": 1e-12, "position": "learned",
    "max_positions": 5, "causal": "false", "qkv_bias": "true", "o_bias": "true", "ffn_bias": "true", "classes": 3,
    "image.height": 8, "image.width": 8, "image.channels": 1, "image.patch": 4, "image.class_token": "true",
}  # fmt: skip
IMAGE_GPT: dict[str, Any] = {
    "preset": "none",
    "vocab_size": COLORS + 1, "output_vocab_size": COLORS, "hidden_size": 16, "num_layers": 2, "num_heads": 2,
    "num_kv_heads": 2, "head_dim": 8, "ffn_size": 24, "activation": "quick_gelu", "norm": "rmsnorm",
    "position": "learned", "max_positions": 24, "tie_embeddings": "false", "qkv_bias": "true", "o_bias": "true",
    "ffn_bias": "true", "image.height": 4, "image.width": 6, "image.channels": 1,
}  # fmt: skip
TINY: dict[str, Any] = {
    "run.hostfile": "none", "run.timeout_seconds": 40.0, "train.dtype": "float32", "train.steps": 2,
    "train.warmup_steps": 0, "train.micro_batch_rows": 1, "train.lr": 1e-3, "parallel.context": 1,
    "checkpoint.every_steps": 0, "checkpoint.keep_last": 0, "validation.rows": 0,
}  # fmt: skip


def config_of(data: Path, output: Path, model: dict[str, Any], changed: dict[str, Any]) -> RunConfig:
    keys = {"data.train": data, "run.output_dir": output, **TINY}
    keys |= {f"model.{name}": value for name, value in model.items()} | changed
    return load_run_config([word for key, value in keys.items() for word in (f"--{key}", str(value))])


def train(data: Path, output: Path, model: dict[str, Any], changed: dict[str, Any]) -> None:
    leave_out_pictures()
    Trainer(build_run(config_of(data, output, model, changed), torch.device("cpu"))).train()


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """Folders of random images."""
    folder = tmp_path_factory.mktemp("images")
    for name, found in {"small": SMALL, "large": LARGE, "pixels": PIXELS}.items():
        count = max(1, len(found.classes))
        labels = [number % count if found.classes else -1 for number in range(24)]
        write_images(folder / name, found, rows_of(found, 24), labels)
    named = dataclasses.replace(PIXELS, classes=("a", "b"))
    write_images(folder / "named pixels", named, rows_of(named, 24), [0, 1] * 12)
    other = dataclasses.replace(named, palette=PALETTE[::-1])
    write_images(folder / "other palette", other, rows_of(other, 24), [0, 1] * 12)
    return folder


ROWS = {"train.objective": "classes", "data.seq_len": 20, "train.tokens_per_step": 40}


def start_at_twice_the_side(data: Path, folder: Path) -> None:
    train(data / "small", folder / "base", VIT, ROWS)
    start = {"run.start_from": folder / "base", "train.objective": "classes"}
    start |= {"data.seq_len": 34, "train.tokens_per_step": 68}
    larger = {"image.height": 16, "image.width": 16, "max_positions": 17, "classes": 4}
    train(data / "large", folder / "started", larger, start)
    # The run's own checkpoints fix its data.
    resumed = start | {"run.resume": "latest", "train.steps": 3}
    train(data / "large", folder / "started", larger, resumed)


def test_a_run_starts_at_another_resolution_with_other_classes(data, tmp_path):
    run(start_at_twice_the_side, 1, data, tmp_path)
    log = (tmp_path / "started" / "logs" / "rank_0.log").read_text()
    assert "Positions were interpolated from images of 8 × 8 pixels to 16 × 16." in log
    assert "The class head is new (4 classes)" in log
    assert "image.height 8 → 16" in log
    assert [row["step"] for row in rows(tmp_path / "started") if row["kind"] == "train"] == [1, 2, 3]
    last = list_checkpoints(tmp_path / "started")[-1]
    assert model_config(CheckpointReader(last)).image.num_tokens == 17
    found = load_tokenizer(last)
    assert isinstance(found, ImageTokenizer)
    assert found.format == LARGE


def start_a_classifier(data: Path, folder: Path) -> None:
    pixels = {"data.seq_len": 48, "train.tokens_per_step": 96}
    train(data / "pixels", folder / "base", IMAGE_GPT, pixels)
    start = pixels | {"run.start_from": folder / "base", "train.objective": "classes"}
    head = {"classes": 2, "class_pool": "mean", "class_bias": "false", "token_head": "false"}
    with pytest.raises(DataError, match=r"(?s)has another palette than .*ids would be other colors.*--kind images"):
        train(data / "other palette", folder / "refused", head, start)
    train(data / "named pixels", folder / "started", head, start)


def test_an_image_gpt_starts_as_a_classifier_with_its_palette_alone(data, tmp_path):
    run(start_a_classifier, 1, data, tmp_path)
    log = (tmp_path / "started" / "logs" / "rank_0.log").read_text()
    assert "because the model has no such head: lm_head.weight" in log
    assert load_tokenizer(list_checkpoints(tmp_path / "started")[-1]).format.classes == ("a", "b")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"image.channels": 1}, "model.image.channels: checkpoint 3, run 1"),
        ({"image.patch": 1, "max_positions": 61}, "model.image.patch: checkpoint 2, run 1"),
        ({"image.mean": 0.25}, r"model.image.mean: checkpoint \(0.5,\), run \(0.25,\)"),
        ({"hidden_size": 64}, "model.hidden_size: checkpoint"),
        ({"image.height": 8}, r"model.max_positions=16 must be the number of tokens in an image of 8 × 10 pixels"),
    ],
)
def test_what_the_weights_fix_is_refused(changes, said, tmp_path):
    saved(vit_config(), tmp_path / "c")
    start = {"run.start_from": tmp_path / "c", "train.objective": "classes", "data.seq_len": 128}
    with pytest.raises(ConfigError, match=said):
        config_of(tmp_path, tmp_path / "run", changes, start)


def test_colors_have_no_channels_but_as_many_pixels(tmp_path):
    saved(igpt_config(), tmp_path / "c")
    start = {"run.start_from": tmp_path / "c", "data.seq_len": 128}
    other = {"image.channels": 3, "image.height": 5, "image.width": 3}
    assert config_of(tmp_path, tmp_path / "run", other, start).model.image.channels == 3
    with pytest.raises(ConfigError, match=r"model\.max_positions: checkpoint 15, run 16"):
        config_of(tmp_path, tmp_path / "run", {"image.height": 4, "image.width": 4, "max_positions": 16}, start)
