"""Muon's state in checkpoints: runs go on in other ZeRO stages and on other ranks as if they had never stopped."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from longctx.checkpoint_format import CHECKPOINTS
from tests.helpers import run_distributed
from tests.launcher.workers import rows, train_each

STEPS, SAVED = 4, 2
SAME: dict[str, Any] = {
    "data.seq_len": 128,
    "train.tokens_per_step": 512,
    "train.steps": STEPS,
    "train.lr": 1e-3,
    "train.dtype": "float32",
    "train.optimizer": "muon",
    "checkpoint.every_steps": SAVED,
    "validation.rows": 0,
    "validation.every_steps": 0,
}


class Way(NamedTuple):
    """How a run is spread over ranks."""

    ranks: int
    zero: int
    expert: int

    @property
    def settings(self) -> dict[str, Any]:
        return {**SAME, "zero.stage": self.zero, "parallel.expert": self.expert, "parallel.context": 1}


REFERENCE = Way(1, 1, 1)
QUICK = (Way(2, 1, 2), Way(2, 3, 1))
WAYS = tuple(Way(*way) for way in itertools.product((2, 4), (0, 1, 2, 3), (1, 2)))


def train(shards: Path, folder: Path, way: Way, **settings: Any) -> Path:
    """Train a run."""
    run_distributed(train_each, way.ranks, shards, {folder: {**way.settings, **settings}}, timeout=200)
    return folder


def go_on(shards: Path, folder: Path, source: Path, way: Way) -> Path:
    """Train from another run's middle."""
    return train(shards, folder, way, **{"run.resume": source / CHECKPOINTS / f"step_{SAVED:06}"})


def check_steps(got: Path, wanted: Path, first: int) -> None:
    """From this step on, losses and norms are those of a run that never stopped."""
    mine, others = rows(got), [row for row in rows(wanted) if row["step"] >= first]
    assert [row["step"] for row in mine] == list(range(first, STEPS + 1)), got.name
    for row, other in zip(mine, others, strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=1e-5), got.name
        assert row["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-5), got.name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("ways", [QUICK, pytest.param(WAYS, marks=pytest.mark.slow)], ids=["quick", "all"])
def test_every_way_trains_the_same_and_goes_on_from_every_other(ways, shards, tmp_path):
    written = {way: train(shards, tmp_path / f"written_{n}", way) for n, way in enumerate((REFERENCE, *ways))}
    for folder in written.values():
        check_steps(folder, written[REFERENCE], 1)
    for n, (source, target) in enumerate(itertools.pairwise((*written, REFERENCE))):
        got = go_on(shards, tmp_path / f"went_on_{n}", written[source], target)
        check_steps(got, written[REFERENCE], SAVED + 1)
