"""A run that starts from other weights and reaches further: the shipped recipe in miniature, and what is refused."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher.report.page
from launcher.config.config_sections import RunConfig
from launcher.config.load_config import QUICKSTART, load_run_config
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.checkpoint_format import CHECKPOINTS, CheckpointReader, list_checkpoints, model_config
from longctx.errors import CheckpointError
from tests.launcher.workers import rows, run

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]  # half a minute of starting ranks


RECIPE = QUICKSTART.parent / "extend-yarn.toml"
SIZES = {
    "model.vocab_size": 512,
    "model.hidden_size": 32,
    "model.num_layers": 2,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 16,
    "model.ffn_size": 48,
}
TINY = {
    "run.hostfile": "none",
    "run.timeout_seconds": 40.0,
    "train.dtype": "float32",
    "validation.rows": 8,
    "checkpoint.every_steps": 0,
    "checkpoint.keep_last": 0,
}
SHORT = {
    **TINY,
    **SIZES,
    "model.preset": "llama-2-7b",
    "model.max_positions": 64,
    "data.seq_len": 64,
    "train.steps": 60,
    "train.tokens_per_step": 512,
    "train.micro_batch_rows": 8,
    "train.lr": 1e-2,
    "train.warmup_steps": 4,
    "parallel.context": 1,
    "validation.every_steps": 0,
}
LONG = {
    **TINY,
    "model.max_positions": 256,
    "model.rope.factor": 4.0,
    "model.rope.original_max_positions": 64,
    "data.seq_len": 256,
    "train.steps": 4,
    "train.tokens_per_step": 1024,
    "train.lr": 1e-3,
    "parallel.context": 2,
    "validation.every_steps": 2,
}
"""What is changed in the recipe: lengths, and that of four times as the recipe has eight. The model is the base's."""

Runs = list[tuple[Path, Path | None, Mapping[str, Any]]]
"""Output folder, recipe file (None: quickstart), what is changed."""


def config_of(shards: Path, output: Path, recipe: Path | None, changed: Mapping[str, Any]) -> RunConfig:
    keys = {"data.train": shards, "run.output_dir": output, **changed}
    named = [] if recipe is None else ["--config", str(recipe)]
    return load_run_config([*named, *(word for key, value in keys.items() for word in (f"--{key}", str(value)))])


def train_each(shards: Path, runs: Runs) -> None:
    launcher.report.page.write_report = lambda folder: folder / "report.html"
    for output, recipe, changed in runs:
        Trainer(build_run(config_of(shards, output, recipe, changed), torch.device("cpu"))).train()


@pytest.fixture(scope="module")
def base(shards, tmp_path_factory) -> Path:
    """A model of 64 tokens, trained by one process until it knows something."""
    folder = tmp_path_factory.mktemp("base") / "run"
    run(train_each, 1, shards, [(folder, None, SHORT)])
    return folder


@pytest.fixture(scope="module")
def runs(shards, base, tmp_path_factory) -> dict[str, Path]:
    """Runs over two ranks that start from it."""
    folder, start = tmp_path_factory.mktemp("extended"), {"run.start_from": base}
    same = {**SHORT, **start, "model.preset": "none", "parallel.context": 2, "train.lr": 1e-3, "train.steps": 1}
    stretched: Runs = [
        (folder / "yarn", RECIPE, {**LONG, **start}),
        (folder / "stopped", RECIPE, {**LONG, **start, "train.stop_after": 2}),
        (folder / "stopped", RECIPE, {**LONG, "run.start_from": "gone", "run.resume": "latest"}),
    ]
    unchanged: Runs = [(folder / f"stage {n}", None, {**same, "zero.stage": n}) for n in (0, 3)]
    run(train_each, 2, shards, [*stretched, *unchanged])
    return {path.name: path for path in folder.iterdir()}


def losses(folder: Path, kind: str) -> list[float]:
    return [r["loss"] for r in rows(folder) if r["kind"] == kind]


def test_the_recipe_in_miniature(base, runs):
    (before,), after = losses(base, "validation"), losses(runs["yarn"], "validation")
    assert before < 5.2 < math.log(512), "the short model knows something"
    assert [r["step"] for r in rows(runs["yarn"]) if r["kind"] == "validation"] == [0, 2, 4]
    assert all(math.isfinite(loss) for loss in [*after, *losses(runs["yarn"], "train")])
    assert abs(after[0] - before) < 0.3, "four times the length, and nothing is forgotten"
    assert abs(losses(runs["yarn"], "train")[0] - before) < 0.5
    assert after[-1] < after[0]


def test_the_schedule_and_the_optimiser_are_new(runs):
    train = [r for r in rows(runs["yarn"]) if r["kind"] == "train"]
    assert [r["step"] for r in train] == [1, 2, 3, 4]
    assert [r["lr"] for r in train] == pytest.approx([1e-3 * n / 20 for n in range(1, 5)])
    saved = CheckpointReader(list_checkpoints(runs["yarn"])[-1])
    assert (saved.step, saved.manifest["training"]["loader"]["rows_consumed"]) == (4, 16)
    rope = model_config(saved).rope
    assert (rope.kind, rope.factor, rope.original_max_positions) == ("yarn", 4.0, 64)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_weights_are_the_checkpoints_to_the_last_digit(base, runs, stage):
    first, _ = losses(runs[f"stage {stage}"], "validation")
    assert first == pytest.approx(losses(base, "validation")[0], rel=1e-6)


def test_a_run_that_resumes_does_not_start_again(runs):
    assert rows(runs["stopped"]) == rows(runs["yarn"])


def refuse_damage(shards: Path, output: Path, changed: Mapping[str, Any], file: str) -> None:
    with pytest.raises(CheckpointError, match=file):
        build_run(config_of(shards, output, RECIPE, changed), torch.device("cpu"))


def test_damaged_weights_are_no_start(shards, base, tmp_path):
    """What else may not be started from is in ``config/test_model_section.py``."""
    damaged = Path(shutil.copytree(list_checkpoints(base)[-1], tmp_path / "damaged"))
    piece = next(damaged.glob("*.safetensors"))
    piece.write_bytes(piece.read_bytes()[:-8])
    changed = {**LONG, "run.start_from": damaged, "parallel.context": 1}
    run(refuse_damage, 1, shards, tmp_path / "out", changed, piece.name)
    assert not (tmp_path / "out" / CHECKPOINTS).exists()
