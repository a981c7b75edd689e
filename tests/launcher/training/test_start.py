"""What a run says and refuses at its start, before a model is built: the run itself, not its parts."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher.plan.memory
import launcher.training.setup
from launcher.training.setup import build_run
from longctx.checkpoint_format import CHECKPOINTS
from longctx.conversion.checkpoint_writer import save_masters
from longctx.errors import ConfigError
from longctx.model.decoder import Decoder
from tests.launcher.runs import tiny_config
from tests.launcher.workers import run


class BuildsError(Exception):
    """The run would allocate its model now."""


def start(shards: Path, output: Path, changed: Mapping[str, Any]) -> str:
    """The log of a run that starts, up to where it would build its model."""

    def build(*_: Any, **__: Any) -> None:
        raise BuildsError

    launcher.training.setup.build_engine = build  # type: ignore[assignment]
    with pytest.raises(BuildsError):
        build_run(tiny_config(shards, output, changed), torch.device("cpu"))
    return (output / f"logs/rank_{os.environ['RANK']}.log").read_text()


def resumable(shards: Path, output: Path) -> None:
    """A checkpoint of a run with the tiny run's own settings."""
    config = tiny_config(shards, output, {"parallel.layout": "zigzag"})
    model = config.model.config()
    folder = output / CHECKPOINTS / "step_000003"
    folder.parent.mkdir(parents=True)
    training = {"config": dataclasses.asdict(config)}
    save_masters(model, Decoder(model).state_dict().items(), folder, dtype=torch.float32, training=training)


def warn_of_each(shards: Path, folder: Path) -> None:
    """Every mistake that a run may make without an error is a warning of rank 0, before the model is built."""
    is_rank_0 = os.environ["RANK"] == "0"
    plain = start(shards, folder / "plain", {})
    assert "WARNING" not in plain
    for said in ("Model: ", "Memory: at least ", "Steps: 8 steps of 512 tokens", "Data: ", "Checkpoints: 4 to come"):
        assert (said in plain) == is_rank_0
    mistakes: dict[str, dict[str, Any]] = {
        "data.seq_len=256 exceeds model.max_positions=128": {"model.max_positions": 128},
        "train.warmup_steps=8 is not below train.steps=8": {"train.warmup_steps": 8},
        "rows repeat within a step": {"train.tokens_per_step": 256 * 10_000},
    }
    for number, (said, changed) in enumerate(mistakes.items()):
        log = start(shards, folder / str(number), changed)
        assert [said in line for line in log.splitlines() if "WARNING" in line] == [True] * is_rank_0
    if is_rank_0:
        resumable(shards, folder / "old")
    changed = {"run.resume": "latest", "train.lr": 1e-3, "train.steps": 9, "parallel.layout": "striped"}
    # Ranks meet before rank 0 looks for the checkpoint.
    log = start(shards, folder / "old", changed)
    said = "train.steps 8 → 9, train.lr 0.005 → 0.001, parallel.layout zigzag → striped"
    assert (f"goes on otherwise than it was begun: {said}" in log) == is_rank_0


def refuse_for_memory(shards: Path, folder: Path) -> None:
    """On every rank alike, and nothing is left."""
    launcher.plan.memory.available_bytes = lambda with_growth=False: 2**20
    with pytest.raises(ConfigError, match="does not fit: a rank needs at least"):
        build_run(tiny_config(shards, folder / "large", {}), torch.device("cpu"))
    assert not (folder / "large").exists()
    start(shards, folder / "large", {"run.memory_check": False})


def warn_and_refuse(shards: Path, folder: Path) -> None:
    """Both, by the same ranks: starting them takes longer."""
    warn_of_each(shards, folder)
    refuse_for_memory(shards, folder)


@pytest.mark.slow
def test_what_a_run_may_not_have_meant_is_said_before_it_builds_anything(shards, tmp_path):
    """All of it was silent; a run that did not fit was killed by the kernel."""
    run(warn_and_refuse, 2, shards, tmp_path)
