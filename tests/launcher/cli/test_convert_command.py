"""``convert``."""

from __future__ import annotations

import json
import re

import torch

from longctx.conversion.checkpoint_writer import save_master_weights
from longctx.model.decoder import Decoder
from tests.launcher.cli.calls import call, refused, succeed
from tests.longctx.samples import tiny_config


def test_there_and_back_are_the_same_bytes(capsys, run, world, tmp_path):
    out = succeed(capsys, "convert", "--to", "hf", run, tmp_path / "hf")
    assert "from_pretrained" in out
    weights = "model.safetensors"
    assert (tmp_path / "hf" / weights).read_bytes() == (world / "hf" / weights).read_bytes()
    assert (tmp_path / "hf" / "tokenizer.model").read_bytes() == (world / "tokenizer.model").read_bytes()


def test_it_says_what_was_cast_and_what_was_verified(capsys, run, tmp_path):
    words = ("convert", "--to", "hf", run / "checkpoints/step_000020")
    out = succeed(capsys, *words, tmp_path / "hf", "--dtype", "bfloat16", "--verify", "tensors")
    assert json.loads((tmp_path / "hf/config.json").read_text())["dtype"] == "bfloat16"
    assert re.search(r"Cast as requested: \d+ tensors float32 → bfloat16, which loses bits", out)
    assert re.search(r"Verified: \d+ tensors, .* hashes match", out)
    assert "logits" not in out.lower()
    assert "Not verified" in call(capsys, *words, tmp_path / "none", "--verify", "none")[1]


def test_options_of_training_that_an_export_leaves_behind_are_named(capsys, run, tmp_path):
    options = {"balance_scope": "global_batch", "router_jitter": 0.1, "residual_dropout": 0.2, "capacity_factor": 1.25}
    config = tiny_config(**options)
    save_master_weights(
        config, Decoder(config).state_dict().items(), tmp_path / "ours", dtype=torch.float32, training={}
    )
    words = ("convert", "--to", "hf", tmp_path / "ours", tmp_path / "hf", "--verify", "none")
    code, _, err = call(capsys, *words)
    assert code == 0
    (line,) = [line for line in err.splitlines() if "training-only settings" in line]
    assert line.startswith("warning: a qwen2_moe config.json has no keys")
    assert all(f"model.{name}={value!r}" in line for name, value in options.items())
    assert "training-only" not in call(capsys, "convert", "--to", "hf", run, tmp_path / "plain", "--verify", "none")[2]


def test_an_occupied_output_is_left_alone(capsys, run, tmp_path):
    (tmp_path / "mine").write_text("x")
    err = refused(capsys, 1, "convert", "--to", "hf", run, tmp_path)
    assert "already exists" in err
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
