"""Every shipped recipe, its sizes reduced: two steps, an export, and the same logits from ``transformers``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from launcher.cli import main
from launcher.config.load import load_run_config
from launcher.config.sections import RunConfig
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.generation import load_model
from tests.helpers import REPOSITORY
from tests.launcher.runs import recipe_flags
from tests.launcher.workers import leave_out_pictures, run

RECIPES = sorted((REPOSITORY / "launcher" / "recipes").glob("*.toml"))
RANKS = 2
SEQ_LEN = 128

REDUCED = {
    "model.vocab_size": 512,
    "model.hidden_size": 64,
    "model.num_layers": 2,
    "model.num_heads": 4,
    "model.head_dim": 16,
    "model.ffn_size": 48,
    "data.seq_len": SEQ_LEN,
    "train.steps": 2,
    "train.tokens_per_step": RANKS * SEQ_LEN,
    "train.micro_batch_rows": 1,
    "train.dtype": "float32",
    "train.warmup_steps": 1,
    "parallel.context": RANKS,
    "run.hostfile": "none",
    "run.timeout_seconds": 40.0,
    "validation.rows": 2,
}
"""Sizes and folders. What the recipe says of anything else, it keeps."""


def reduced(recipe: Path, shards: Path, output: Path) -> RunConfig:
    """The recipe for a tiny model on two ranks."""
    whole = load_run_config(recipe_flags(recipe))
    keys = {**REDUCED, "data.train": shards, "run.output_dir": output}
    keys["model.num_kv_heads"] = 4 if whole.model.num_kv_heads == whole.model.num_heads else 2
    keys["parallel.ulysses"] = min(RANKS, whole.parallel.ulysses)
    keys["parallel.expert"] = min(RANKS, whole.parallel.expert)
    flags = [word for key, value in keys.items() for word in (f"--{key}", str(value))]
    return load_run_config([*recipe_flags(recipe), *flags])


def train_each(shards: Path, runs: Sequence[tuple[Path, Path]]) -> None:
    leave_out_pictures()
    for recipe, output in runs:
        Trainer(build_run(reduced(recipe, shards, output), torch.device("cpu"))).train()


@pytest.fixture(scope="module")
def trained(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run folder a recipe, under the recipe's name."""
    folder = tmp_path_factory.mktemp("recipes")
    run(train_each, RANKS, shards, [(recipe, folder / recipe.stem) for recipe in RECIPES])
    return folder


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_a_model_of_every_recipe_is_exported(recipe: Path, trained: Path, tmp_path: Path):
    exported = tmp_path / "hf"
    assert main(["convert", "--to", "hf", str(trained / recipe.stem), str(exported)]) == 0
    tokens = torch.randint(512, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float32).eval()(tokens).logits
        model = load_model(trained / recipe.stem)
        ours = model.logits(model(tokens, torch.arange(48)[None]))
    # Two float32 forward passes of the same products, in other orders.
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    assert ours.std() > 1e-3, "logits that say something"
