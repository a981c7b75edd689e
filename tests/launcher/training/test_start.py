"""What a run says and refuses at its start, before a model is built."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher.plan.memory_estimate
import launcher.training.setup
from launcher.training.setup import build_run
from longctx.errors import ConfigError
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


def warn_and_refuse(shards: Path, folder: Path) -> None:
    """What a run is, and what it may not have meant: once."""
    log = start(shards, folder / "warm", {"train.warmup_steps": 8})
    warned = [line for line in log.splitlines() if "WARNING" in line]
    assert log.count("Steps: 8 steps of 512 tokens") == len(warned) == (os.environ["RANK"] == "0")
    assert all("train.warmup_steps=8 is not below train.steps=8" in line for line in warned)
    # What is refused is refused on every rank alike, and nothing is left.
    launcher.plan.memory_estimate.available_bytes = lambda with_growth=False: 2**20
    with pytest.raises(ConfigError, match="does not fit: a rank needs at least"):
        build_run(tiny_config(shards, folder / "large", {}), torch.device("cpu"))
    assert not (folder / "large").exists()
    start(shards, folder / "large", {"run.memory_check": False})


@pytest.mark.slow
def test_what_a_run_may_not_have_meant_is_said_before_it_builds_anything(shards, tmp_path):
    """It was silent; a run that did not fit was killed by the kernel. All warnings are in ``test_summary.py``."""
    run(warn_and_refuse, 2, shards, tmp_path)
