"""The run that nothing befell, made once, and a scene beside it for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import FaultRows
from tests.launcher.faults.scene import Scene
from tests.launcher.workers import run, train


@pytest.fixture(scope="session")
def undisturbed(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run to its end. Read-only."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(train, 2, shards, folder, {"parallel.expert": 2})
    return folder


@pytest.fixture
def scene(shards: Path, undisturbed: Path, tmp_path: Path, fault_rows: FaultRows) -> Scene:
    """A run of the same settings that has not begun."""
    return Scene(shards, undisturbed, tmp_path, fault_rows, {shards: "DATA"})
