"""What a run refuses at its start, before a model is built."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import launcher.plan.memory
import launcher.training.setup
from launcher.training.setup import build_run
from longctx.errors import ConfigError
from tests.launcher.runs import tiny_config
from tests.launcher.workers import run


class BuildsError(Exception):
    """The run would allocate its model now."""


def start(shards: Path, output: Path, changed: Mapping[str, Any]) -> None:
    """A run that starts, up to where it would build its model."""

    def build(*_: Any, **__: Any) -> None:
        raise BuildsError

    launcher.training.setup.build_engine = build  # type: ignore[assignment]
    with pytest.raises(BuildsError):
        build_run(tiny_config(shards, output, changed), torch.device("cpu"))


def refuse_for_memory(shards: Path, folder: Path) -> None:
    """On every rank alike, and nothing is left."""
    launcher.plan.memory.available_bytes = lambda with_growth=False: 2**20
    with pytest.raises(ConfigError, match="does not fit: a rank needs at least"):
        build_run(tiny_config(shards, folder / "large", {}), torch.device("cpu"))
    assert not (folder / "large").exists()
    start(shards, folder / "large", {"run.memory_check": False})


@pytest.mark.slow
def test_a_run_that_does_not_fit_is_refused_before_it_builds_anything(shards, tmp_path):
    """It was killed by the kernel. What else a start warns of is in ``test_summary.py``."""
    run(refuse_for_memory, 2, shards, tmp_path)
