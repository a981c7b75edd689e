"""Files in ``written_before``, written on 2026-11-30 by commit f8c05175, before names changed: they are still read.

A run of six steps on two ranks, with dropout, experts and jitter, in float32: its shards, its config.toml, its metrics
and its checkpoint of step 4. No file there is ever written again; a format that changes gets a second folder.
"""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from data_pipeline.shards.reader import ShardSet, shard_tokens
from launcher.config.load_config import load_run_config
from launcher.metrics.record import read_metrics
from launcher.training.setup import build_run
from launcher.training.trainer import Trainer
from longctx.generation import load_model
from longctx.tokenizer import load_tokenizer
from tests.helpers import run_distributed
from tests.launcher.workers import leave_out_pictures

BEFORE = Path(__file__).parent / "written_before"
SHARDS, RUN = BEFORE / "shards", BEFORE / "run"
CHECKPOINT = RUN / "checkpoints/step_000004"
SAVED, LAST = 4, 6


def continued(folder: Path) -> list[str]:
    """Flags for a run that continues a copy of the old one in ``folder``."""
    changed = {"data.train": SHARDS, "run.output_dir": folder, "run.resume": "auto", "run.hostfile": "none"}
    return ["--config", str(RUN / "config.toml"), *(word for k, v in changed.items() for word in (f"--{k}", str(v)))]


def train(folder: Path) -> None:
    """Continue the old run to its last step."""
    leave_out_pictures()
    Trainer(build_run(load_run_config(continued(folder)), torch.device("cpu"))).train()


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    """Records of one kind after the checkpoint."""
    return [record for record in read_metrics(folder) if record["kind"] == kind and record["step"] > SAVED]


def test_every_key_of_the_config_is_read():
    kept = tomllib.loads((RUN / "config.toml").read_text())
    config = load_run_config(["--config", str(RUN / "config.toml")])
    for section, keys in kept.items():
        for key, value in keys.items():
            now = getattr(getattr(config, section), key)
            if not isinstance(value, dict):
                assert (list(now) if isinstance(value, list) else now) == value, f"{section}.{key}"


def test_the_shards_are_read():
    manifest, tokenizer = json.loads((SHARDS / "manifest.json").read_text()), load_tokenizer(SHARDS)
    shards = ShardSet.open(SHARDS)
    tokens = shard_tokens(shards, 0)
    assert (shards.manifest.documents, shards.manifest.tokens) == (manifest["documents"], manifest["tokens"])
    assert len(tokens) == manifest["tokens"]
    texts = [tokenizer.decode(part.tolist()) for part in np.split(tokens, np.flatnonzero(tokens == 2) + 1)]
    assert all(re.fullmatch(r"([a-z]+[ .])*", text) for text in texts), texts[:3]
    assert sum(map(bool, texts)) == manifest["documents"]


def test_the_weights_are_read():
    model = load_model(CHECKPOINT)
    saved = load_file(CHECKPOINT / "rank_00000.safetensors") | load_file(CHECKPOINT / "rank_00001.safetensors")
    table = saved["model.embed_tokens.weight/master/0"].reshape(320, 16)
    assert np.array_equal(model.model.embed_tokens.weight.detach().numpy(), table)
    tokens = torch.arange(24)[None]
    assert model.logits(model(tokens, tokens)).isfinite().all()


@pytest.mark.timeout(120)
def test_the_run_continues_with_the_numbers_that_it_had(tmp_path: Path):
    folder = tmp_path / "run"
    shutil.copytree(RUN, folder)
    run_distributed(train, 2, folder, timeout=90.0)
    for kind in ("train", "validation"):
        then, now = records(RUN, kind), records(folder, kind)
        assert [record["step"] for record in now] == [record["step"] for record in then] != []
        for old, new in zip(then, now, strict=True):
            assert old.keys() <= new.keys()
            for key in ("loss", "grad_norm", "balance_loss", "router_entropy"):
                if key in old:
                    # float32, on other processors than the run had
                    assert new[key] == pytest.approx(old[key], rel=1e-5), (kind, key)
            for key in ("lr", "tokens", "expert_layers", "num_targets"):
                assert new.get(key) == old.get(key), (kind, key)
